"""Replicas of tensor groups have the bits of replicas in lockstep, each of members in lockstep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from bigbrain_fx.bundles import verify
from bigbrain_fx.core import Host
from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan, part_channels, replica_cut
from bigbrain_fx.verification.reference import MembersReference
from tests.support.bundles import cluster as where, split_small
from tests.support.messages import refused
from tests.verification.test_members import HEADS, cluster, planned, trained
from tools.conformance.matrix import Bench

STEPS = 2
NORMS = HEADS.replace("nn.LayerNorm(16))", "Rows())").replace(
    "class Net(",
    """class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x.flatten(0, 1)).view_as(x)


class Net(""",
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model has several buckets, too; one thread rounds as one thread."""
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 2048)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(NORMS)
    file = load_model_file(path)
    return Bench(file, capture(file.model, file.example_batch, file.loss, name="net"), STEPS)


@pytest.mark.gate("zero 3, tree, again")
@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        pytest.param(
            4, {"sum_order": "tree", "zero_stage": 3, "recompute": "all"}, id="zero 3, tree, again"
        ),
        pytest.param(4, {"sum_order": "micro", "tensor_shares": (3, 1)}, id="micro, 3:1"),
        pytest.param(4, {}, id="replica"),
        pytest.param(8, {"zero_stage": 1, "recompute": (0, 2)}, id="zero 1, pipelines"),
        pytest.param(8, {"zero_stage": 2, "sum_order": "micro", "schedule": "list"}, id="zero 2"),
        pytest.param(6, {"tensor": 3, "replica_shares": (3, 1)}, id="members of three"),
    ],
)
def test_a_bundle_has_the_bits_of_its_reference(
    bench: Bench, tmp_path: Path, devices: int, choices: dict[str, object]
) -> None:
    """Tied weights, dropout, clipping and running statistics are in the model."""
    plan = planned(bench, devices, **{"replicas": 2, **choices})
    assert (plan.stages.replicas, plan.stages.members) == (2, choices.get("tensor", 2))
    assert len(plan.stages.devices) == devices
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike
    assert {"norm.0.qkv.weight[0]", "norm.0.qkv.weight[1]"} <= set(actual.tensors)


def gradients(bench: Bench, plan: Plan) -> dict[str, Tensor]:
    """Return the gradients of all members of a step, by the names under which they are kept."""
    rows = [bench.captured.inputs(plan.rows) for _ in range(plan.micro_batches)]
    tensors = {name: tensor.detach() for name, tensor in bench.captured.tensors.items()}
    reference = MembersReference(plan, tensors, {})
    _, found = reference.of_each(rows, 0, 0)
    return {reference.stored(n, m): g for m, own in enumerate(found) for n, g in own.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.nightly
def test_the_order_of_sums_says_the_bits(bench: Bench) -> None:
    """Summed by number they are those of one replica, in whatever replicas; else they are not."""
    one = gradients(bench, planned(bench, 2))
    assert equal(one, gradients(bench, planned(bench, 4, replicas=2, sum_order="micro")))
    assert not equal(one, gradients(bench, planned(bench, 4, replicas=2)))
    tree = gradients(bench, planned(bench, 2, replicas=1, sum_order="tree"))
    assert equal(tree, gradients(bench, planned(bench, 8, replicas=4, sum_order="tree")))


def test_exchanges_of_a_forward_are_made_again_with_it(bench: Bench) -> None:
    once, again = (
        part_channels(planned(bench, 2, recompute=recompute)) for recompute in (None, "all")
    )
    assert {(p.sender, p.numel) for p in once} == {(p.sender, p.numel) for p in again}
    sent = [sum(part.per_step for part in parts) for parts in (once, again)]
    assert sent[0] < sent[1] < 2 * sent[0]  # those of the backward are not


@pytest.mark.nightly
def test_a_member_sums_with_the_same_member_of_the_other_replicas(bench: Bench) -> None:
    plan = planned(bench, 8, replicas=2)
    member = {stage.device: stage.member for stage in plan.stages.stages}
    sums = [edge for edge in plan.stages.edges if edge.kind in ("reduce", "gather")]
    stages = plan.stages.stages
    assert sums
    assert all(stages[e.source].member == stages[e.target].member for e in sums)
    assert all(stages[e.source].replica != stages[e.target].replica for e in sums)
    parts = part_channels(plan)
    assert all(member[part.sender] != member[part.receiver] for part in parts)
    alone = part_channels(planned(bench, 4))
    assert sum(p.per_step for p in parts) == sum(p.per_step for p in alone)
    assert "replica 1 of 2, TP rank 1 of 2" in bundle_texts(plan)["device_d7.py"]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"replicas": 3}, "groups of 2 devices, and replica 0 of 3 has 1"),
        ({"replicas": 2, "offload": ("activations", "state", "weights")}, "--tensor-parallel"),
        ({"replicas": 2, "asynchronous": "2bw"}, "--asynchronous"),
        ({"replicas": 8, "tensor": 2}, "8 replicas need as many devices"),
    ],
)
def test_options_against_replicated_groups_are_refused(
    bench: Bench, choices: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        planned(bench, 3 if choices["replicas"] == 3 else 4, **choices)
    assert said in f"{caught.value.what} {caught.value.help}"


def test_collectives_sum_each_member_with_its_peers(bench: Bench) -> None:
    """A process group is of the devices with one part of the weights; a lone group has none."""
    options = {"replicas": 2, "zero_stage": 1, "sum_order": "backend"}
    plan = planned(bench, 8, **options)
    stages = plan.stages.stages
    assert plan.stages.by_backend
    groups = {tuple(stages[index].device for index in b.stages) for b in plan.stages.buckets}
    assert groups == {(f"d{i}", f"d{i + 4}") for i in range(4)}
    with refused("BX1344"):
        planned(bench, 2, sum_order="backend")


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 2])
def test_processes_sum_members_by_collectives_to_rounding(
    zero: Literal[0, 2], tmp_path: Path
) -> None:
    options = Options(
        "naive", micro_batches=4, replicas=2, tensor=2, zero_stage=zero, sum_order="backend"
    )
    found = verify(split_small(tmp_path, where(4), options), steps=3, processes=True)
    assert found.passed
    assert sum(check.rounded for check in found.checks) == 4


@pytest.mark.nightly
def test_unlike_replicas_that_are_named(bench: Bench) -> None:
    where = replace(cluster(6), replicas=(("d0", "d1", "d2", "d3"), ("d4", "d5")))
    options = Options("naive", micro_batches=4, tensor=2)
    plan = make_plan(bench.captured.graph, where, Source(""), options)
    assert plan.placement.tensor is not None
    assert plan.placement.tensor.groups == (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))
    assert plan.stages.replicas == 2


def test_columns_share_the_nic_of_a_host(bench: Bench) -> None:
    """No step ends before all that leaves a host has gone through its NIC, of whichever member."""
    rate = 1e5
    hosts = tuple(Host(name, nic_bytes_per_s=rate) for name in "ab")
    devices = tuple(replace(d, host="ab"[i // 2]) for i, d in enumerate(cluster(4).devices))
    where = replace(cluster(4), devices=devices, hosts=hosts)
    source = Source(str(bench.file.path), True, False, True, True, bench.file.clip_norm, "")
    options = Options("naive", micro_batches=4, tensor=2, replicas=2)
    plan = make_plan(bench.captured.graph, where, source, options)
    host_of = {stage.index: where.device[stage.device].host for stage in plan.stages.stages}
    sums = [edge for edge in plan.stages.edges if edge.kind in ("reduce", "gather")]
    left = sum(e.nbytes for e in sums if (host_of[e.source], host_of[e.target]) == ("a", "b"))
    assert left
    assert plan.forecast.step_s >= left / rate
