"""Replicas of tensor groups divide a table where their sums would send it over slow links."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.support.training import bench_of, trained
from tools.conformance.matrix import Bench

MODEL = """import torch
from torch import nn
from torch.nn import functional as F
from tests.support.training import HEADS, WIDE, bench_of, equal, grouped, planned, trained


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(4000, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, tokens):
        x = self.tokens(tokens).mean(1)
        return self.head(x + self.down(F.gelu(self.up(x))))


def model():
    return Net()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(4000, (16, 8), generator=dice)
        yield {"tokens": tokens, "y": torch.randint(8, (16,), generator=dice)}


def example_batch():
    return next(batches(0))


def lr_scale(step):
    return 1.0 / (1 + step)
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench() -> Bench:
    return bench_of(MODEL)


SLOW, NEAR = Link(1e-4, 1e8), Link(1e-6, 50e9)


def planned(bench: Bench, inside: Link = NEAR, **choices: object) -> Plan:
    """Two hosts of two devices, with slow links between them; a replica is a group of a host's."""
    names = [(f"d{i}", f"h{i // 2}") for i in range(4)]
    devices = tuple(Device(name, host, "cpu", 2**33, 1e9, 12e9, 1e-6) for name, host in names)
    cluster = Cluster(devices, SLOW, (("d0", "d1", inside), ("d2", "d3", inside)))
    source = Source(str(bench.file.path), True, False, True, True, None, "")
    given = {"partitioner": "naive", "micro_batches": 2, "tensor": 2, "replicas": 2, **choices}
    return make_plan(bench.captured.graph, cluster, source, Options(**given))  # type: ignore[arg-type]


def divided(plan: Plan) -> set[str]:
    assert plan.placement.tensor is not None
    return {place.name for axis in plan.placement.tensor.axes for place in axis.params}


@pytest.mark.gate("2")
@pytest.mark.parametrize("zero", [0, 2])
def test_a_table_is_divided_between_slow_hosts_and_trains_alike(
    bench: Bench, tmp_path: Path, zero: int
) -> None:
    plan = planned(bench, zero_stage=zero)
    assert "tokens.weight" in divided(plan)
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert {"tokens.weight[0]", "tokens.weight[1]"} <= set(actual.tensors)


def test_a_table_stays_whole_where_adding_lookups_takes_longer(bench: Bench) -> None:
    assert "tokens.weight" not in divided(planned(bench, Link(1e-2, 50e9)))


def test_axes_that_were_named_are_all(bench: Bench) -> None:
    plan = planned(bench, tensor_axes=("hidden",))
    assert "tokens.weight" not in divided(plan)


@pytest.mark.gate("chosen1")
@pytest.mark.parametrize("chosen", [{"partitioner": "auto"}, {"partitioner": "naive", "tensor": 2}])
def test_a_table_is_divided_where_nothing_fits_otherwise(
    bench: Bench, tmp_path: Path, chosen: dict[str, object]
) -> None:
    """The table, its gradient and AdamW's state need 2 MiB beside a process of 40."""
    devices = tuple(Device(f"d{i}", "h", "cpu", 43 << 20, 1e9, 12e9, 1e-6) for i in range(2))
    source = Source(str(bench.file.path), True, False, True, True, None, "")
    options = Options(**chosen)  # type: ignore[arg-type]  # fields of Options
    plan = make_plan(bench.captured.graph, Cluster(devices, Link(1e-5, 1e9)), source, options)
    assert "tokens.weight" in divided(plan)
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""
