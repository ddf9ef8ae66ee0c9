"""Profiling: every op is charged its own time, the database fills, and a second run goes on."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Op
from bigbrain_fx.costs.profiles import OpProfile, ProfileStore, signatures
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture, run_graph
from bigbrain_fx.measure.ops import MeasuredRows, Profiled, ProfileOptions, profile, twenty_ops
from bigbrain_fx.measure.ops.context import WatchOverheads, timed_step, whole_step_s
from bigbrain_fx.measure.ops.machine import processor_name
from bigbrain_fx.measure.ops.optimizer import LARGE, optimizer_times
from bigbrain_fx.measure.ops.rounds import WARM_UP, Rounds, relative_spread, trimmed_mean
from bigbrain_fx.measure.ops.stopwatch import ClockStopwatch, stopwatch
from bigbrain_fx.measure.ops.subject import Subject
from tests.support.command_line import call, write_model

ROWS = 4
CPU = torch.device("cpu")
NOTHING = WatchOverheads(0.0, 0.0)


class Net(nn.Module):
    """A lookup, two products (one of them by the lookup's own table), dice, and a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + F.dropout(torch.tanh(self.layer(h)), 0.5, self.training)
        return h @ self.table.weight.t()


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"])


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    batch = {"x": torch.arange(8) % 7, "y": torch.arange(8) % 5}
    return capture(Net(), batch, loss)


def subject_of(captured: Captured, rows: int = ROWS) -> Subject:
    graph = captured.graph.at(rows)
    return Subject(graph, captured.tensors, captured.inputs(rows), captured.functions, CPU)


def ticks() -> ClockStopwatch:
    """Count calls: an interval is as long as the looks at the clock within it."""
    count = itertools.count()
    return ClockStopwatch(lambda: float(next(count)))


# ------------------------------------------------------------------------------- charging


def test_every_interval_is_charged_to_its_op(captured: Captured) -> None:
    subject = subject_of(captured)
    timed = timed_step(subject, ticks(), NOTHING)
    for op, signature in signatures(subject.graph):
        assert timed.forward_s[id(op)] == 1.0  # one look at the clock each
        assert (timed.nodes_s[id(op)] >= 1.0) == signature.wants_backward, op.name
    added = {op.target for op in subject.graph.ops if timed.sums_s.get(id(op), 0.0)}
    assert added == {"aten.embedding.default", "aten.linear.default"}  # a tied one where first read


@pytest.mark.parametrize("frozen", [False, True])
def test_a_watched_run_keeps_nothing(captured: Captured, frozen: bool) -> None:
    subject, held = subject_of(captured), list[weakref.ref[Tensor]]()
    forward = subject.forward

    def watched(watch: Callable[[Op, object], None], frozen: bool) -> Tensor | None:
        def ran(op: Op, value: object) -> None:
            watch(op, value)
            held.append(weakref.ref(value)) if isinstance(value, Tensor) else None

        return forward(ran, frozen)

    subject.forward = watched  # type: ignore[assignment,method-assign]  # as `_Run` calls it
    timed_step(subject, ticks(), NOTHING, frozen)
    assert held
    assert not [value for value in held if value() is not None]


def test_the_cost_of_measuring_is_subtracted(captured: Captured) -> None:
    subject = subject_of(captured)
    timed = timed_step(subject, ticks(), WatchOverheads(tick_s=1.0, hook_s=1.0))
    assert set(timed.forward_s.values()) == {0.0}


def test_a_subject_adds_up_the_gradients_of_the_model(captured: Captured) -> None:
    subject = subject_of(captured)
    for _ in range(3):
        found = subject.forward()
        assert found is not None
        subject.backward(found, subject.trained)
    leaves = {name: t.detach().requires_grad_() for name, t in captured.tensors.items()}
    plain = run_graph(subject.graph, leaves, subject.inputs, key=subject._keyed)
    value = plain[str(subject.graph.loss)]
    assert isinstance(value, Tensor)
    for name, total in subject._sums.items():
        (gradient,) = torch.autograd.grad([value], [leaves[name]], retain_graph=True)
        torch.testing.assert_close(total, 3 * 0.125 * gradient)


def test_inference_has_forwards_only(captured: Captured) -> None:
    graph = capture(Net(), {"x": torch.arange(8) % 7}, training=False)
    subject = subject_of(graph, rows=2)
    rounds = Rounds(subject, stopwatch(CPU, 1))
    rounds.again()
    profiles = rounds.profiles()
    assert profiles
    assert all(p.backward_input_s == p.backward_weight_s == 0.0 for p in profiles)
    assert subject.named == []


def test_rounds_make_a_profile_of_every_signature(captured: Captured) -> None:
    subject = subject_of(captured)
    rounds = Rounds(subject, stopwatch(CPU, 1))
    rounds.warm_up()
    for _ in range(3):
        rounds.again()
    found = {p.signature.key: p for p in rounds.profiles()}
    assert set(found) == {s.key for _, s in signatures(subject.graph)}
    assert all(p.samples % 3 == 0 for p in found.values())
    assert rounds.ops_s == pytest.approx(
        sum(found[s.key].total_s for _, s in signatures(subject.graph))
    )
    assert whole_step_s(subject, stopwatch(CPU, 1)) > 0
    linear = next(p for p in found.values() if p.signature.target == "aten.linear.default")
    assert linear.flops == 2 * ROWS * 6 * 6
    assert linear.backward_weight_s > 0
    tanh = next(p for p in found.values() if p.signature.target == "aten.tanh.default")
    assert tanh.backward_weight_s == 0


# ------------------------------------------------------------------------------- the optimizer


def test_an_optimizer_is_timed_on_sets_of_its_own_names() -> None:
    seen: list[list[tuple[str, tuple[int, ...]]]] = []

    def make(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.append([(name, tuple(tensor.shape)) for name, tensor in named])
        return torch.optim.SGD([tensor for _, tensor in named], lr=0.5)

    leaves = [("b", torch.ones(6)), ("w", torch.ones(8, 5)), ("s", torch.ones(()))]
    found = optimizer_times(leaves, make, ticks(), rounds=1)
    assert found.name == "SGD"
    assert [(s.what, s.tensors, s.nbytes, s.seconds) for s in found.steps] == [
        ("all", 3, 4 * 47, 1.0),
        ("the smaller half", 1, 4, 1.0),
        ("the larger half", 2, 4 * 46, 1.0),
        ("tiny ones", 3, 4 * (4 + 16 + 1), 1.0),
        ("large ones", 3, 4 * (1 + LARGE + LARGE // 5 * 5), 1.0),
    ]
    assert [shape for _, shape in seen[-1]] == [(), (LARGE,), (LARGE // 5, 5)]
    assert all({name for name, _ in some} <= {"b", "w", "s"} for some in seen)
    assert leaves[1][1][0, 0] < 1.0  # the model's own tensors, and not copies


def test_an_optimizer_that_cannot_be_timed_on_the_model_is_adamw() -> None:
    leaves = [("w", torch.ones(8, 5))]
    wants_closure = lambda named: torch.optim.LBFGS([tensor for _, tensor in named])  # noqa: E731
    found = optimizer_times(leaves, wants_closure, ticks(), 1)
    assert found.name == "AdamW"
    assert [step.what for step in found.steps] == ["all", "tiny ones", "large ones"]


def test_an_optimizer_that_takes_its_own_shapes_only_is_timed_on_those() -> None:
    def make(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        assert [tuple(tensor.shape) for _, tensor in named] == [(8, 5)]
        return torch.optim.SGD([tensor for _, tensor in named], lr=0.5)

    found = optimizer_times([("w", torch.ones(8, 5))], make, ticks(), 1)
    assert [(found.name, step.what) for step in found.steps] == [("SGD", "all")]


@pytest.mark.parametrize("at", [0, 1])
def test_memory_that_is_used_up_is_said(at: int) -> None:
    """Of the model's own parameters; of a set that is made up for the fit it is left out."""
    made: list[int] = []

    def make(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made.append(len(named))
        if len(made) == 2 + at:  # after the first, which tells the class
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return torch.optim.SGD([tensor for _, tensor in named], lr=0.5)

    leaves = [("w", torch.ones(8, 5))]
    if at == 0:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            optimizer_times(leaves, make, ticks(), 1)
    else:
        found = optimizer_times(leaves, make, ticks(), 1)
        assert (found.name, [step.what for step in found.steps]) == ("SGD", ["all", "large ones"])


def test_an_optimizer_begins_with_an_empty_queue() -> None:
    said: list[str] = []

    class Told(ClockStopwatch):
        def settle(self) -> None:
            said.append("settle")

    def mark() -> float:
        said.append("mark")
        return 0.0

    optimizer_times([("w", torch.ones(8, 5))], None, Told(mark), rounds=2)
    a_set = ["settle", "mark", "mark"] * (2 + WARM_UP) + ["settle"]
    assert said == a_set * 3


# ------------------------------------------------------------------------------- averages


def test_a_trimmed_mean_forgets_what_is_far_off_and_a_spread_says_how_far() -> None:
    assert trimmed_mean([5.0]) == 5.0
    assert trimmed_mean([1.0, 3.0]) == 2.0
    assert trimmed_mean([*[2.0] * 8, -100.0, 100.0]) == 2.0
    assert relative_spread([3.0]) == relative_spread([2.0] * 5) == 0.0
    assert relative_spread([1.0, 2.0, 3.0]) == pytest.approx(1.0)


def test_processors_of_one_name_are_told_apart(tmp_path: Path) -> None:
    said = "model name : AMD EPYC\ncpu family : 25\nmodel : 17\nstepping : 1\n"
    (tmp_path / "cpuinfo").write_text(said)
    assert processor_name(tmp_path / "cpuinfo") == "AMD EPYC (family 25, model 17, stepping 1)"
    assert processor_name(tmp_path / "absent")


# ------------------------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Profiled, list[str]]:
    folder = tmp_path_factory.mktemp("profile")
    model, said = write_model(folder), list[str]()
    options = ProfileOptions(rows=(2, 4), rounds=2, time_limit_s=120.0, device="cpu")
    store = folder / "p.sqlite"
    return model, store, profile(model, store, options, said.append), said


def test_a_run_fills_the_database(done: tuple[Path, Path, Profiled, list[str]]) -> None:
    _, path, found, said = done
    assert found.model == "Net"
    assert [entry.rows for entry in found.measured] == [2, 4]
    assert all(entry.agreement is not None for entry in found.measured)
    assert said[0] == "2 rows, round 1 of 2"
    store = ProfileStore(path, read_only=True)
    (machine,) = store.machines()
    assert machine.key == found.machine
    (session,) = store.sessions()
    assert (session.model, session.optimizer, session.machine) == ("model.Net", "AdamW", machine)
    assert machine.optimizer_s_per_tensor > 0
    assert session.steps[0].what == "all"
    assert said[-1].startswith("AdamW: ")
    assert f"it fits {len(session.steps)} sets within" in said[-1]
    rows = store.rows(machine.key)
    assert len(rows) >= max(entry.signatures for entry in found.measured)
    assert all(_sensible(entry) for _, entry in rows)


def _sensible(entry: OpProfile) -> bool:
    return entry.forward_s >= 0 and entry.samples >= 2 and entry.total_s < 1.0


@pytest.mark.nightly
def test_a_second_run_goes_on_where_the_first_one_was(
    done: tuple[Path, Path, Profiled, list[str]],
) -> None:
    model, path, first, _ = done
    before = {profile for _, profile in ProfileStore(path).rows()}
    more = ("--rows", "2,8", "--rounds", "2", "--device", "cpu", "--json")
    ran = call("profile", model, "--db", path, *more)
    assert ran.code == 0, ran.err
    two, eight = ran.objects
    assert (two["rows"], two["lacking"], two["agreement"]) == (2, 0, None)
    assert (eight["rows"], eight["machine"]) == (8, first.machine)
    assert eight["lacking"] > 0
    after = {profile for _, profile in ProfileStore(path).rows()}
    assert before < after  # sizes are part of a signature: nothing was measured twice


@pytest.mark.nightly
def test_a_run_that_is_killed_keeps_what_it_wrote(
    done: tuple[Path, Path, Profiled, list[str]], tmp_path: Path
) -> None:
    """Killed in the sixth round of very many; the database has that of the first and the sixth."""
    model, store = done[0], tmp_path / "ops.sqlite"
    wanted: dict[str, object] = {
        "location": f"{model}:model",
        "store": str(store),
        "rows": [2],
        "threads": 1,
    }
    wanted |= {"rounds": 100_000, "seed": 0, "training": True, "device": "cpu"}
    wanted |= {"assume": {}, "leaves": [], "tensor_shares": [], "tensor_axes": []}
    with subprocess.Popen(
        [sys.executable, "-m", "bigbrain_fx.measure.ops.child", json.dumps(wanted)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if json.loads(line).get("round") == 6:
                child.kill()
    assert child.returncode == -signal.SIGKILL
    again = profile(model, store, ProfileOptions(rows=(2,), rounds=6, device="cpu"))
    assert [entry.lacking for entry in again.measured] == [0]


def test_a_foreign_file_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    model = write_model(tmp_path, "raise SystemExit('this must not run')")
    (tmp_path / "notes.txt").write_text("not a database at all, but of some length " * 50)
    ran = call("profile", model, "--db", tmp_path / "notes.txt")
    assert ran.code == 2
    assert "expected a profile database" in ran.err


def test_rows_are_numbers(tmp_path: Path) -> None:
    ran = call("profile", write_model(tmp_path), "--db", tmp_path / "p.sqlite", "--rows", "4,x")
    assert ran.code == 2
    assert "--rows" in ran.err


def test_a_model_that_ends_its_process_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path, "import os\nos._exit(3)\n")
    with pytest.raises(InputError, match=r"model.py ended its process \(exit code 3\)"):
        profile(model, tmp_path / "p.sqlite", ProfileOptions(time_limit_s=120.0))


def test_a_profile_prints_readably() -> None:
    entry = MeasuredRows(4, 91, 26, 26, ops_s=0.019, step_s=0.020)
    assert str(entry) == (
        "4 rows: 91 ops, 26 of them distinct; 26 measured: their sum is 19.00 ms, "
        "a whole step 20.00 ms (ratio 0.950)"
    )
    assert str(MeasuredRows(4, 91, 26, 0)).endswith("all are in the database")


def test_another_hosts_profiles_are_taken_over(
    done: tuple[Path, Path, Profiled, list[str]], tmp_path: Path
) -> None:
    _, theirs, _, _ = done
    ours = tmp_path / "ours.sqlite"
    there = len(ProfileStore(theirs, read_only=True).rows())
    merged = call("profile", "--db", ours, "--merge", theirs)
    assert (merged.code, merged.out) == (0, f"took over {there} profiles of {theirs}\n")
    assert len(ProfileStore(ours, read_only=True).rows()) == there
    again = call("profile", "--db", ours, "--merge", theirs, "--json")
    assert json.loads(again.out) == {"merged": str(theirs), "profiles": 0}


@pytest.mark.nightly
def test_without_a_model_it_measures_twenty_dear_ops(tmp_path: Path) -> None:
    done = call("profile", "--db", tmp_path / "few.sqlite", "--rounds", "1", "--json")
    assert done.code == 0, done.err
    assert done.objects[0]["model"] == "TwentyOps"
    dear = [p for _, p in ProfileStore(tmp_path / "few.sqlite").rows() if p.backward_input_s > 0]
    assert len({p.signature.target for p in dear}) >= 15
    out = tmp_path / "mine.json"
    fitted = call("fit", tmp_path / "few.sqlite", "--base", "shipped", "--out", out)
    assert fitted.code == 0, fitted.err
    assert "corrected by" in fitted.out


def test_the_twenty_ops_are_a_model_that_trains() -> None:
    net, batch = twenty_ops.model(), twenty_ops.example_batch()
    loss = twenty_ops.loss(net(batch["image"], batch["tokens"]), batch)
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert all(parameter.grad is not None for parameter in net.parameters())
