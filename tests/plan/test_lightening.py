"""Ops that a backward makes again: what is worth it, the ledger, the same bits, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.bundles import source_of
from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, Plan, from_json, make_plan, replan, to_json
from bigbrain_fx.plan.making import costs_of
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.recompute import Wanted, recompute_text, wanted_by
from bigbrain_fx.plan.schedule import Part, choices, may_run_again
from bigbrain_fx.plan.schedule.walk import walk
from tests.support import samples


def planned(name: str, cluster: Cluster | None = None, **choices: object) -> Plan:
    found = samples.sample(name)
    given = {"partitioner": "naive", "micro_batches": 4, "schedule": "gpipe", **choices}
    options = Options(**given)  # type: ignore[arg-type]  # fields of Options
    return make_plan(found.graph, cluster or samples.cluster(2), found.source, options)


def with_share(plan: Plan, share: float) -> Cluster:
    """Return the plan's cluster with so much of each device's peak as its memory."""
    devices = []
    for device in plan.cluster.devices:
        entry = plan.forecast.of(device.name)
        less = replace(entry, peak_bytes=int(entry.peak_bytes * share))
        devices.append(replace(device, memory_bytes=needed_bytes(less, device)))
    return replace(plan.cluster, devices=tuple(devices))


def test_each_choice_keeps_less_and_says_what_is_kept() -> None:
    plan = planned("gpt")
    graph, costs = plan.graph.at(plan.rows), costs_of(plan)
    for stage in plan.stages.stages:
        found = choices(Part(graph, plan.stages, stage, costs))
        assert found[0].ops == ()
        assert len(found) > 3
        assert sorted(found, key=lambda choice: -choice.kept_bytes) == list(found)
        for choice in found:
            marked = Part(graph, plan.stages, replace(stage, again=choice.ops), costs)
            assert walk(marked).saved_bytes == pytest.approx(choice.kept_bytes, rel=0.01)


def test_nothing_that_draws_or_is_written_or_sent_runs_again() -> None:
    plan = planned("gpt")
    graph = plan.graph.at(plan.rows)
    for stage in plan.stages.stages:
        for name in may_run_again(Part(graph, plan.stages, stage, costs_of(plan))):
            assert not graph.op[name].random
            assert name not in stage.sends


def test_ops_are_nearly_free_and_auto_takes_what_memory_asks_for() -> None:
    plain = planned("gpt")
    assert planned("gpt", recompute="auto").stages == plain.stages
    cheap = planned("gpt", recompute="ops")
    assert cheap.stages.again == (0, 1)
    assert not cheap.stages.recompute
    assert cheap.forecast.step_s < 1.02 * plain.forecast.step_s
    tight = with_share(plain, 0.8)
    with pytest.raises(NoPlanError):
        planned("gpt", tight)
    fits = planned("gpt", tight, recompute="auto")
    assert fits.stages.again == (0, 1)
    assert fits.forecast.step_s < 1.08 * plain.forecast.step_s  # GELU is 0.3 of a copy
    assert planned("gpt", with_share(plain, 0.6), recompute="auto").stages.recompute == (0, 1)
    assert "makes 1 op of stage 0, 1 op of stage 1 again" in recompute_text(cheap.stages)
    assert from_json(to_json(cheap), "plan.json") == cheap
    assert wanted_by(cheap.stages, cheap.trained) == "ops"
    assert replan(cheap, samples.cluster(3)).stages.again == (1, 2)


def test_a_split_backward_is_refused_and_auto_runs_its_whole_stage() -> None:
    with pytest.raises(InputError, match="splits its backward") as caught:
        planned("gpt", schedule="zb-h1", recompute="ops")
    assert "--schedule 1f1b" in str(caught.value.help)
    assert not planned("gpt", schedule="zb-h1", recompute="auto").stages.again


FREE = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs) + 1.0
        return inputs


def model():
    return Net()


def loss(output, batch):
    return F.mse_loss(output, batch["inputs"])


def example_batch():
    return {"inputs": torch.ones(4, 4)}
"""


@pytest.mark.nightly
def test_a_stage_that_keeps_only_what_it_received_makes_nothing_again(tmp_path: Path) -> None:
    path = tmp_path / "free.py"
    path.write_text(FREE)
    with capture_file(path) as session:
        options = Options("naive", micro_batches=2, schedule="1f1b", recompute="ops")
        source = source_of(session.facts)
        plan = make_plan(session.graph, samples.cluster(3), source, options)
    assert 1 not in plan.stages.again


@pytest.mark.nightly
def test_replicas_make_again_what_does_not_fit_as_one_model_does() -> None:
    """Each replica was placed as if it kept all: `auto` was refused where `all` found a plan."""
    found, cluster = samples.sample("unet"), samples.cluster(4)

    def made(recompute: Wanted, memory_bytes: int) -> Plan:
        devices = tuple(replace(d, memory_bytes=memory_bytes) for d in cluster.devices)
        given = replace(cluster, devices=devices)
        options = Options("naive", micro_batches=8, replicas=2, recompute=recompute)
        return make_plan(found.graph, given, found.source, options)

    def most(plan: Plan) -> int:
        return max(needed_bytes(d, plan.cluster.device[d.device]) for d in plan.forecast.devices)

    kept, again = most(made(None, 1 << 40)), most(made("all", 1 << 40))
    close = again - 3 * (kept - again) // 10
    short = most(made(None, close)) - 1  # placed otherwise, all that is kept fits in `close`, too
    with pytest.raises(NoPlanError):
        made(None, short)
    assert max(most(made("all", short)), most(made("auto", short))) <= short
