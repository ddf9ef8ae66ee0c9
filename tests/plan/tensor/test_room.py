"""Memory that another member than the first lacks is made free by what runs again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bigbrain_fx.core import Cluster, Device, Graph, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.memory_check import needed_bytes
from models import gpt


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
