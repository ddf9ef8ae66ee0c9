"""Stages that run again: the same bits as the unsplit model, less memory, and what is refused."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx
from bigbrain_fx.cli.console import plan_json, show_forecast, show_plan
from bigbrain_fx.core import Forward, ParamRef, Ref, Stage, Stages
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Plan, from_json, make_plan, replan, to_json
from bigbrain_fx.plan.explanation import explain
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.plan_report import report
from bigbrain_fx.plan.recompute import (
    read_recompute,
    recompute_text,
    recomputing,
    wanted_by,
)
from bigbrain_fx.plan.remedy import plan_or_remedy
from bigbrain_fx.verification.imported_bundle import (
    batches_of,
    run_bundle,
    weights_of,
)
from bigbrain_fx.verification.links import same_training
from bigbrain_fx.verification.reference import Reference
from bigbrain_fx.verification.training import train_reference
from tests.support import samples
from tests.support.command_line import call
from tests.support.synthetic import graph_of, op, tensor, weight
from tools.conformance.matrix import imported

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def planned(name: str, **choices: object) -> Plan:
    found = samples.sample(name)
    given = {"partitioner": "naive", "micro_batches": 4, **choices}
    options = Options(**given)  # type: ignore[arg-type]  # fields of Options
    return make_plan(found.graph, samples.cluster(3), found.source, options)


# --------------------------------------------------------------------------- which stages


def test_stages_are_read_from_the_command_line() -> None:
    assert read_recompute(None) is None  # left open
    assert read_recompute("none") == ()
    assert [read_recompute(text) for text in ("all", "ops", "auto")] == ["all", "ops", "auto"]
    assert read_recompute("2, 0,2") == (2, 0)
    for text in ("", "first", "1,", "-1", "²"):
        with pytest.raises(InputError, match="expected auto, ops, all, none or numbers of stages"):
            read_recompute(text)


def test_stages_are_marked_and_asked_for_again() -> None:
    found = planned("digits", recompute=(0, 2))
    assert found.stages.recompute == (0, 2)
    assert wanted_by(found.stages, found.trained) == (0, 2)
    assert from_json(to_json(found), "plan.json") == found
    everything = planned("digits", recompute="all")
    assert everything.stages.recompute == (0, 1, 2)
    assert wanted_by(everything.stages, everything.trained) == "all"
    assert replan(everything, samples.cluster(2)).stages.recompute == (0, 1)
    assert wanted_by(planned("digits").stages, (0, 1, 2)) is None


def test_a_stage_that_is_not_there_or_not_trained_is_refused() -> None:
    graph = graph_of([op("a", "aten.relu.default", Ref("x"), out=tensor(4))])
    stages = Stages((Stage(0, "d0", ("a",)), Stage(1, "d1", ())), ())
    with pytest.raises(InputError, match="there is no stage 9 to recompute for") as caught:
        recomputing(graph, stages, {0}, (0, 9))
    assert caught.value.help == "choose from 0, or write all"
    with pytest.raises(InputError, match="stage 1 has no backward"):
        recomputing(graph, stages, {0}, (1,))
    assert recomputing(graph, stages, {0}, (0, 9), lenient=True).recompute == (0,)
    assert recomputing(graph, stages, {0}, "all").recompute == (0,)


def test_a_stage_that_writes_into_a_trained_parameter_is_refused() -> None:
    made = op("a", "aten.mul_.Tensor", ParamRef("w"), Ref("x"), out=tensor(4))
    graph = graph_of([replace(made, mutates=("w",))], [weight("w", 4)])
    stages = Stages((Stage(0, "d0", ("a",)),), ())
    with pytest.raises(InputError, match="writes into the trained parameter 'w'"):
        recomputing(graph, stages, {0}, "all")


# --------------------------------------------------------------------------- the same bits


class Tracker(nn.Module):
    """Reads a buffer of its own that it then writes: each micro-batch sees the one before."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) - self.mean
        with torch.no_grad():
            self.mean.copy_(0.9 * self.mean + 0.1 * y.mean(0))
            self.seen += 1
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Tracker(), nn.BatchNorm1d(8), Tracker(), Tracker())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.nightly
def test_buffers_that_are_read_and_written_are_those_of_the_unsplit_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Net()
    options = Options("naive", schedule="gpipe", micro_batches=4, recompute="all")
    cluster, batch = samples.cluster(2), {"x": torch.randn(16, 8)}
    made = bigbrain_fx.split(module, cluster, tmp_path / "b", options, example_batch=batch)
    plan = made.plan
    assert plan.stages.recompute == (0, 1)
    with imported(made.bundle, force_adamw=True) as bundle:
        reference = Reference(plan.graph, plan.stages, weights_of(made.bundle, plan), {})
        training = bundle.BUNDLE.training
        expected = train_reference(reference, batches_of(bundle, plan), training, 3, plan.seed)
        actual = run_bundle(bundle, plan, 3, plan.seed)
    checks = same_training(plan, expected, actual)
    assert [check for check in checks if not check["passed"]] == []
    assert actual.tensors["blocks.0.seen"] == 3 * 4


# --------------------------------------------------------------------------- what is emitted


def test_the_device_file_says_it_and_nothing_else_changes() -> None:
    plain, again = (bundle_texts(planned("gpt", recompute=r)) for r in (None, (0,)))
    differing = [name for name in plain if name.endswith(".py") and plain[name] != again[name]]
    assert differing == ["device_d0.py", "train.py"]  # the plan's key is in train.py
    lines = difflib.ndiff(plain["device_d0.py"].splitlines(), again["device_d0.py"].splitlines())
    assert [line for line in lines if line[0] in "+-?"] == [
        "+     # these keep no activations: each backward first runs the stage forward again",
        "+     recompute = (0,)",
    ]
    assert "\nRecompute: each backward runs the forward of stage 0 again." in again["README.md"]


def test_a_plan_says_it_wherever_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("digits", recompute=(1,))
    said = "recompute: each backward runs the forward of stage 1 again"
    assert plan_json(found)["recompute"] == (1,)
    show_plan(found, 0, verbose=True)
    show_forecast(found)
    shown = capsys.readouterr().out
    assert said in shown
    assert "4 micro-batches of 16 rows, recompute" in " ".join(shown.split())
    assert all(said in text for text in (str(explain(found)), str(found), report(found)))
    assert recompute_text(planned("digits").stages) == ""


# --------------------------------------------------------------------------- time and memory


def test_a_backward_takes_a_forward_more_and_holds_one_micro_batch() -> None:
    plain, again = (planned("gpt", schedule="gpipe", recompute=r) for r in (None, "all"))
    forwards = 4 * sum(isinstance(i, Forward) for i in plain.programs[0].instructions) // 4
    assert forwards == 4
    for before, after in zip(plain.forecast.devices, again.forecast.devices, strict=True):
        assert after.busy_s > before.busy_s
        assert after.activations_bytes < 0.6 * before.activations_bytes
        assert after.peak_bytes < before.peak_bytes
    explained = explain(again)  # the neighbours that it is compared with recompute, too
    steps = [a.step_s for cut in explained.cuts for a in cut.alternatives if a.step_s is not None]
    assert steps
    assert min(steps) > plain.forecast.step_s


def test_recomputing_is_named_where_it_makes_a_plan_fit() -> None:
    found = samples.sample("gpt")
    options = Options("chain-dp", schedule="gpipe", micro_batches=8)
    cluster = samples.cluster(2)
    again = make_plan(found.graph, cluster, found.source, replace(options, recompute="all"))
    enough = max(needed_bytes(e, cluster.device[e.device]) for e in again.forecast.devices)
    tight = replace(
        cluster,
        devices=tuple(replace(d, memory_bytes=int(1.04 * enough)) for d in cluster.devices),
    )
    some = make_plan(found.graph, tight, found.source, replace(options, recompute=(0, 1)))
    assert some.stages.recompute == (0, 1)
    with pytest.raises(NoPlanError) as caught:
        plan_or_remedy(found.graph, tight, found.source, options)
    assert caught.value.help == "a plan was found with --activation-checkpointing auto"


# --------------------------------------------------------------------------- the command line


@pytest.mark.nightly
def test_a_stage_that_is_not_there_is_refused_on_the_command_line(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(samples.cluster_text(2))
    digits = ROOT / "models" / "digits.py"
    done = call("estimate", digits, "--devices", cluster, "--activation-checkpointing", "9")
    message = (
        "error[BX1266]: there is no stage 9 to recompute for\n  at: --activation-checkpointing\n"
    )
    assert (done.out, done.err.startswith(message)) == ("", True)
    done = call("estimate", digits, "--devices", cluster, "--activation-checkpointing", "x")
    assert done.err.startswith(
        "error[BX1265]: expected auto, ops, all, none or numbers of stages, found 'x'"
    )
