"""What a group's ops take, and memory that another member than the first lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from bigbrain_fx.core import (
    Cluster,
    Device,
    Graph,
    Host,
    Link,
    Op,
    Overheads,
    Ref,
    TensorParallel,
    TensorSpec,
)
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, Source, make_plan, sharded, wanted_axes
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.tensor.costs import column_costs
from bigbrain_fx.plan.tensor.groups import seen_by
from bigbrain_fx.plan.tensor.messages import exchange_s, exchanged_s
from models import gpt

NBYTES = 4_000_000
HANDLED = Overheads(message_s=1e-3, message_bytes_per_s=1e9)


def cluster_of(*speeds: float, latency_s: float = 0.01) -> Cluster:
    devices = tuple(
        Device(f"d{i}", f"h{i}", "cpu", 2**34, 1e9 * speed, 1e12, overheads=HANDLED)
        for i, speed in enumerate(speeds)
    )
    return Cluster(devices, Link(latency_s, 1e8))


def summed(numel: int) -> Op:
    spec = TensorSpec((numel,), "float32", (1,), requires_grad=True)
    return Op("sum", "shard.all_reduce", (), outputs=(spec,))


def test_members_that_come_at_once_wait_for_one_message() -> None:
    cluster = cluster_of(1, 1)
    handled_s = 1e-3 + NBYTES / 1e9
    closed_s = 2 * handled_s + 0.01 + NBYTES / 1e8 + 3 * NBYTES / 1e12
    assert exchange_s(summed(NBYTES // 4), cluster, ("d0", "d1"), backward=False) == pytest.approx(
        closed_s
    )


def test_the_last_rank_finds_sent_parts() -> None:
    cluster = cluster_of(1, 1)
    on_s = exchanged_s(summed(NBYTES // 4), cluster, ("d0", "d1"), [0.0, 1.0], backward=False)
    handled_s = 1e-3 + NBYTES / 1e9
    assert on_s[1] == pytest.approx(1.0 + 2 * handled_s + 3 * NBYTES / 1e12)
    assert on_s[0] == pytest.approx(1.0 + 2 * handled_s + 0.01 + NBYTES / 1e8 + 3 * NBYTES / 1e12)


def test_messages_to_one_member_follow_each_other() -> None:
    cluster = cluster_of(1, 1, 1)
    op = summed(1000)  # too small for pieces: each sends it whole to both others
    handled_s, wire_s = 2 * (1e-3 + 4000 / 1e9), 4000 / 1e8
    on_s = exchanged_s(op, cluster, ("d0", "d1", "d2"), [0.0] * 3, backward=False)
    closed_s = 2 * handled_s + 0.01 + 2 * wire_s + 2 * 3 * 4000 / 1e12
    assert on_s == pytest.approx([closed_s] * 3)


def on_two_hosts(nic_bytes_per_s: float | None) -> Cluster:
    """Four devices, two a host, whose links would carry ten times what the NICs do."""
    devices = tuple(Device(f"d{i}", f"h{i // 2}", "cpu", 2**34, 1e9, 1e15) for i in range(4))
    hosts = tuple(Host(name, nic_bytes_per_s) for name in ("h0", "h1"))
    return Cluster(devices, Link(0.01, 1e9), hosts=hosts)


@pytest.mark.parametrize(
    ("groups", "messages"),
    [
        ((("d0", "d1", "d2", "d3"),), 4),  # two here send to two there
        ((("d0", "d2"), ("d1", "d3")), 2),  # one of each group
        ((("d0", "d2"),), 1),
        ((("d0", "d1"), ("d2", "d3")), 0),  # nothing leaves a host
    ],
)
def test_exchanges_through_one_nic_share_it(
    groups: tuple[tuple[str, ...], ...], messages: int
) -> None:
    op, cluster = summed(1000), on_two_hosts(1e8)  # too small for pieces
    others_s = (len(groups[0]) - 1) * 4000 / 1e9
    closed_s = 0.01 + max(messages * 4000 / 1e8, others_s) + (len(groups[0]) - 1) * 3 * 4000 / 1e15
    for group in groups:
        seen = seen_by(cluster, groups, group)
        assert exchange_s(op, seen, group, backward=False) == pytest.approx(closed_s)
        alone = seen_by(on_two_hosts(None), groups, group)
        assert exchange_s(op, alone, group, backward=False) <= closed_s


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("speeds", "shares"), [((1, 1), (1, 1)), ((4, 1), (1, 1)), ((2, 1), (2, 1))]
)
def test_ops_add_up_to_the_last_members_time(
    speeds: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    graph = capture(Net(), {"x": torch.randn(512, 64)}).graph
    cluster, group = cluster_of(*speeds, latency_s=1e-4), ("d0", "d1")
    tensor = TensorParallel((group,), shares, wanted_axes(graph, Options(tensor=2)))
    members = [m.at(512) for m in sharded(graph, tensor.axes, shares).members]
    source = Source("net.py")
    columns = column_costs(members, tensor, cluster, source, "analytical")
    for place, costs in enumerate(columns):
        name = group[place]
        ops = costs.ops[name].values()
        found = sum(c.forward_s for c in ops), sum(c.backward_s for c in ops)
        assert found == pytest.approx(walked(members, cluster, source), rel=1e-9)
        assert all(c.forward_s >= 0 and c.backward_s >= c.backward_input_s >= 0 for c in ops)


def walked(members: list[Graph], cluster: Cluster, source: Source) -> tuple[float, float]:
    """Follow both members by hand: forward, then backward from zero."""
    own = [estimated(m, cluster, source, "analytical").ops[f"d{i}"] for i, m in enumerate(members)]
    passes = []
    for back in (False, True):
        ready = [0.0, 0.0]
        ops = list(members[0].ops)
        for op in reversed(ops) if back else ops:
            kind = op.target.removeprefix("shard.")
            if kind == op.target:
                for i in (0, 1):
                    cost = own[i][op.name]
                    ready[i] += cost.backward_s if back else cost.forward_s
            elif (kind == "copy_to_group") == back and (not back or op.requires_grad):
                nbytes = op.outputs[0].nbytes
                each = 1e-3 + nbytes / 1e9
                sent = [r + each for r in ready]
                there = [sent[1 - i] + 1e-4 + nbytes / 1e8 for i in (0, 1)]
                ready = [max(sent[i], there[i]) + each + 3 * nbytes / 1e12 for i in (0, 1)]
        passes.append(max(ready))
    return passes[0], passes[1]


def scattered(kind: str, numel: int) -> Op:
    """Return an exchange of a whole tensor of so many numbers, half of it each member's."""
    part = numel // 2 if kind == "reduce_scatter" else numel
    spec = TensorSpec((part,), "float32", (1,), requires_grad=True)
    return Op("part", f"shard.{kind}", (Ref("x"), 0, 1, (1, 1)), outputs=(spec,))


@pytest.mark.parametrize("kind", ["reduce_scatter", "gather_to_group"])
@pytest.mark.parametrize("backward", [False, True])
def test_half_a_sum_is_sent_by_halves(kind: str, backward: bool) -> None:
    """Half the bytes on the wire; taken apart or put together, and where it is a sum, added."""
    cluster, half = cluster_of(1, 1), NBYTES // 2
    took_s = exchange_s(scattered(kind, NBYTES // 4), cluster, ("d0", "d1"), backward=backward)
    is_sum = backward == (kind == "gather_to_group")
    handled_s = 1e-3 + half / 1e9
    touched = 2 * NBYTES + (3 * half if is_sum else 0)
    assert took_s == pytest.approx(2 * handled_s + 0.01 + half / 1e8 + touched / 1e12)


# --------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    module = gpt.GPT(blocks=2, dim=128, heads=4, sequence=64, vocabulary=64, dropout=0.0)
    tokens = torch.randint(0, 64, (16, 65))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return capture(module, batch, gpt.loss).graph


def cluster(memory_bytes: int) -> Cluster:
    names = [f"d{i}" for i in range(4)]
    devices = (Device(name, "h", "cpu", memory_bytes, 50e9, 10e9) for name in names)
    return Cluster(tuple(devices), Link(50e-6, 1e9))


def needed(plan: Plan) -> int:
    devices = plan.cluster.device
    return max(needed_bytes(each, devices[each.device]) for each in plan.forecast.devices)


@pytest.mark.gate("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_auto_fits_where_all_does_though_a_later_member_holds_most(
    graph: Graph, schedule: str
) -> None:
    """The first member has a third: by its ledger alone, all was kept, and the plan was refused."""
    given = Options(
        "naive", schedule=schedule, micro_batches=4, tensor=2, tensor_shares=(1, 2), recompute="all"
    )
    source = Source("", has_loss=True)
    kept = needed(make_plan(graph, cluster(1 << 33), source, replace(given, recompute=())))
    least = needed(make_plan(graph, cluster(1 << 33), source, given))
    assert least < kept
    tight = cluster(least + 1024)
    with pytest.raises(NoPlanError):
        make_plan(graph, tight, source, replace(given, recompute=()))
    plan = make_plan(graph, tight, source, replace(given, recompute="auto"))
    assert needed(plan) <= least + 1024
    assert any(stage.runs_again or stage.again for stage in plan.stages.stages)
