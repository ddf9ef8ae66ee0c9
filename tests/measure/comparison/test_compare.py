"""Several ways to split one model, side by side: forecasts, measurements, and what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bigbrain_fx.bundles import FoundModel, captured_model
from bigbrain_fx.bundles.launch import Run, RunError, RunOptions, StepLine
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import CaptureError, InputError, VerificationError
from bigbrain_fx.frontend import load_model_file
from bigbrain_fx.measure.comparison import Comparison, compare, contest
from bigbrain_fx.measure.comparison.agreement import ROUNDING, Agreement, agreement
from bigbrain_fx.plan import Options, Plan, Source, make_plan, read_plan
from bigbrain_fx.planning.registry import preset
from tests.support.bundles import MODEL, cluster
from tests.support.command_line import write_model

RAN = ("naive", "scattered")
NAMES = (*RAN, "learned")
FOUR = Options(micro_batches=4)
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), MODEL, "letters.py")


@pytest.fixture(scope="module")
def found(model: Path) -> Comparison:
    """Contenders that are really run, and `learned`, whose fitted model is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGBRAIN_LEARNED_COSTS", "nowhere.json")
        return compare(model, cluster(2), NAMES, FOUR, steps=STEPS, rounds=1)


@pytest.fixture(scope="module")
def captured(model: Path) -> FoundModel:
    """The same model captured in this process, once for all tests that plan only."""
    file = load_model_file(model)
    options = Options(mode="train")
    with captured_model(file.model, options, file.example_batch, file.loss, 60.0) as made:
        return made


@pytest.fixture
def once(captured: FoundModel, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let `compare` find that capture; return how it asked for each."""
    asked: list[object] = []

    @contextmanager
    def again(*given: object, meta: bool) -> Iterator[FoundModel]:
        asked.append(meta)
        yield captured

    monkeypatch.setattr(contest, "captured_model", again)
    return asked


class Recorder:
    """A runner that runs nothing: it records whose turn it was and answers with given losses."""

    def __init__(self, losses: Callable[[str], list[float]] = lambda name: [2.0, 1.0]) -> None:
        self.turns: list[str] = []
        self.losses = losses

    def __call__(self, bundle: Path, options: RunOptions) -> Run:
        self.turns.append(bundle.name)
        given = self.losses(bundle.name)
        steps = tuple(StepLine(i, loss, 9.0 if i == 0 else 0.5) for i, loss in enumerate(given))
        assert options.logs is not None
        return Run(steps, {"d0": 100 + len(self.turns)}, options.logs)


def recorded(model: Path, runner: Recorder, options: Options = FOUR, rounds: int = 2) -> Comparison:
    names = ("naive", "analytical", "scattered")
    return compare(model, cluster(2), names, options, steps=2, rounds=rounds, runner=runner)


# --------------------------------------------------------------------------- really run


@pytest.mark.nightly
def test_each_is_planned_as_split_would(found: Comparison) -> None:
    for name in RAN:
        plan, (method, judge) = found.of(name).plan, preset(name)
        assert plan is not None
        options = replace(FOUR, partitioner=method, estimator=judge)
        assert plan == make_plan(plan.graph, cluster(2), plan.source, options)
        assert found.of(name).step_s == plan.forecast.step_s
        assert found.of(name).planning_s > 0.0
    assert found.capture_s > 0.0


def test_each_was_measured_beside_its_forecast(found: Comparison) -> None:
    for contender in found.contenders[:2]:
        assert len(contender.steps_s) == STEPS - 1
        assert contender.measured_step_s == float(np.median(contender.steps_s))
        assert contender.measured_rows_per_s == 8 / contender.measured_step_s
        assert contender.plan is not None
        assert [name for name, _ in contender.max_rss_bytes] == list(contender.plan.stages.devices)
    best = found.best
    assert best is not None
    assert best.measured_step_s == min(c.measured_step_s or 9.0 for c in found.contenders[:2])


def test_all_compute_the_same(found: Comparison) -> None:
    """Dropout and tied weights included; the model has them."""
    (agreed,) = found.agreements
    assert agreed.between == RAN
    assert agreed.alike
    assert agreed.kind == "bitwise"
    assert found.of("naive").losses[0] == found.of("scattered").losses[0]
    found.require_sound()


def test_a_contender_without_a_plan_is_a_row_with_a_remedy(found: Comparison) -> None:
    learned = found.of("learned")
    assert learned.plan is None
    assert learned.step_s is None
    assert learned.measured_step_s is None
    assert learned.code == "BX1461"  # it found no file
    assert "bigbrain-fx fit" in learned.help
    assert str(found).count("\n  learned: ") == 1
    assert [contender.bundle for contender in found.contenders] == [""] * 3  # none was kept


@pytest.mark.nightly
def test_inference_compares_outputs(model: Path) -> None:
    options = Options(micro_batches=2, mode="eval")
    done = compare(model, cluster(2), ("naive", "scattered"), options, steps=2, rounds=1)
    assert [agreed.kind for agreed in done.agreements] == ["bitwise"]
    assert [len(contender.steps_s) for contender in done.contenders] == [1, 1]
    assert [contender.losses for contender in done.contenders] == [(), ()]


# --------------------------------------------------------------------------- turns


@pytest.mark.nightly
@pytest.mark.usefixtures("once")
def test_every_other_round_goes_backwards(model: Path) -> None:
    runner = Recorder()
    done = recorded(model, runner, rounds=3)
    there = ["naive", "analytical", "scattered"]
    assert runner.turns == [*there, *there[::-1], *there]
    assert done.of("naive").steps_s == (0.5, 0.5, 0.5)  # the first step of a round took 9
    assert done.of("naive").max_rss_bytes == (("d0", 107),)  # the largest of its rounds


@pytest.mark.nightly
@pytest.mark.usefixtures("once")
def test_other_losses_fail_the_comparison(model: Path) -> None:
    runner = Recorder(lambda name: [2.0, 1.5 if name == "scattered" else 1.0])
    done = recorded(model, runner)
    assert [agreed.kind for agreed in done.agreements] == ["bitwise", "different"]
    with pytest.raises(VerificationError, match="different things") as caught:
        done.require_sound()
    assert "naive and scattered: different by 2.5e-01" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.usefixtures("once")
def test_a_bundle_that_does_other_things_each_time_is_told(model: Path) -> None:
    runner = Recorder(lambda name: [2.0, 1.0 + (len(runner.turns) > 5) * (name == "naive")])
    done = recorded(model, runner)
    (again,) = [agreed for agreed in done.agreements if agreed.kind != "bitwise"]
    assert again.between == ("naive", "naive again")
    assert not again.passed


@pytest.mark.nightly
@pytest.mark.usefixtures("once")
def test_other_micro_batches_may_draw_other_numbers(model: Path) -> None:
    """Dropout is drawn for a micro-batch: no fault, but it is said."""

    def losses(name: str) -> list[float]:
        return [2.0, 1.5 if name == "naive" else 1.0]

    split = {"naive": 2, "analytical": 4, "scattered": 4}

    def planned(graph: Graph, devices: Cluster, source: Source, options: Options) -> Plan:
        name = options.partitioner if options.partitioner in split else "analytical"
        return make_plan(graph, devices, source, replace(options, micro_batches=split[name]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "make_plan", planned)
        done = recorded(model, Recorder(losses), Options())
    first, second = done.agreements
    assert (first.between, first.kind, first.alike) == (("naive", "analytical"), "different", False)
    assert (second.between, second.kind) == (("analytical", "scattered"), "bitwise")
    assert "micro-batches of other sizes" in str(first)
    done.require_sound()


@pytest.mark.nightly
@pytest.mark.usefixtures("once")
def test_a_bundle_that_does_not_run_is_a_row_too(model: Path) -> None:
    def losses(name: str) -> list[float]:
        if name == "analytical":
            raise RunError("the process of device d0 ended", notes=("no CUDA",), help="get one")
        return [2.0, 1.0]

    runner = Recorder(losses)
    done = recorded(model, runner)
    failed = done.of("analytical")
    assert failed.reason == "its bundle did not run: the process of device d0 ended (no CUDA)"
    assert failed.step_s is not None  # the forecast stands
    assert runner.turns.count("analytical") == 1  # it is not tried again
    assert [agreed.between for agreed in done.agreements] == [("naive", "scattered")]
    done.require_sound()


@pytest.mark.usefixtures("once")
def test_nobody_ran(model: Path) -> None:
    def losses(name: str) -> list[float]:
        raise RunError(f"{name} is broken")

    done = recorded(model, Recorder(losses))
    with pytest.raises(InputError, match="no contender's bundle ran") as caught:
        done.require_sound()
    assert "scattered: its bundle did not run: scattered is broken" in caught.value.notes


# --------------------------------------------------------------------------- planning alone


def test_the_model_is_captured_once(model: Path, once: list[object]) -> None:
    done = compare(model, cluster(2), ("naive", "analytical", "m-topo", "naive "), FOUR)
    assert once == [True]  # without weights: nothing is run
    assert [contender.name for contender in done.contenders] == ["naive", "analytical", "m-topo"]
    assert done.agreements == ()
    assert done.best is not None
    assert done.best.step_s == min(contender.step_s or 9.0 for contender in done.contenders)


@pytest.mark.usefixtures("once")
def test_memory_that_only_one_keeps(model: Path) -> None:
    """Equal parts do not fit on a small device; a planner that looks at memory finds a way."""
    wide = cluster(2)
    small = replace(wide.devices[1], memory_bytes=2**24 + 40_000)
    uneven = replace(wide, devices=(wide.devices[0], small))
    done = compare(model, uneven, ("naive", "analytical"), FOUR)
    assert done.of("naive").plan is None
    assert "needs" in done.of("naive").reason
    assert done.best is done.of("analytical")
    done.require_sound()


@pytest.mark.usefixtures("once")
def test_a_partitioner_that_crashes_is_a_row(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(graph: Graph, devices: Cluster, source: Source, options: Options) -> Plan:
        if options.partitioner == "naive":
            raise KeyError("v7")
        return make_plan(graph, devices, source, options)

    monkeypatch.setattr(contest, "make_plan", planned)
    done = compare(model, cluster(2), ("naive", "m-topo"), FOUR)
    assert done.of("naive").reason == "KeyError: 'v7'"
    assert "--debug --partitioner naive" in done.of("naive").help
    assert done.of("m-topo").plan is not None


@pytest.mark.nightly
@pytest.mark.usefixtures("once")
def test_auto_is_a_contender(model: Path) -> None:
    done = compare(model, cluster(2), ("naive", "analytical", "auto"), FOUR)
    auto, others = done.of("auto"), done.contenders[:2]
    assert auto.plan is not None, auto.reason
    assert auto.step_s is not None
    assert all(auto.step_s <= (other.step_s or 0.0) for other in others)


@pytest.mark.usefixtures("once")
def test_one_estimator_judges_all(model: Path) -> None:
    done = compare(model, cluster(2), ("naive", "learned"), FOUR, estimator="analytical")
    assert [contender.estimator for contender in done.contenders] == ["analytical"] * 2
    assert not done.forecasts_differ_in_kind


@pytest.mark.parametrize(
    ("names", "more", "what"),
    [
        (("naive", "nave"), {}, "no partitioner 'nave'"),
        ((), {}, "nothing to compare"),
        (("", " "), {}, "nothing to compare"),
        (("naive",), {"steps": 1}, "1 step cannot be measured"),
        (("naive",), {"steps": 2, "rounds": 0}, "no 0 rounds"),
    ],
)
def test_bad_options_are_refused_before_the_capture(
    names: tuple[str, ...],
    more: dict[str, int],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contest, "captured_model", None)
    with pytest.raises(InputError, match=what):
        compare("there/is/none.py", cluster(2), names, **more)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_captured_fails_all(tmp_path: Path) -> None:
    path = write_model(tmp_path, "def model():\n    raise ValueError('no')\n")
    with pytest.raises((CaptureError, InputError)):
        compare(path, cluster(2))


@pytest.mark.usefixtures("once")
def test_kept_bundles_are_bundles(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = compare(model, cluster(2), ("naive", "m-topo"), FOUR, save=kept)
    for name in ("naive", "m-topo"):
        assert done.of(name).bundle == str(kept / name)
        assert read_plan(kept / name).key == (done.of(name).plan or pytest.fail(name)).key
    with pytest.raises(InputError, match="naive exists already"):
        compare(model, cluster(2), ("naive",), FOUR, save=kept)


# --------------------------------------------------------------------------- the nouns


def test_bytes_between_devices_are_of_all_messages(found: Comparison) -> None:
    for contender in found.contenders[:2]:
        plan = contender.plan
        assert plan is not None
        edges = [edge for edge in plan.stages.edges if not plan.stages.is_local(edge)]
        times = {"activation": 4, "gradient": 4, "tied": 1, "norm": 1}  # a step
        assert {"activation", "gradient", "norm"} <= {edge.kind for edge in edges}
        assert contender.cut_bytes == sum(edge.nbytes * times[edge.kind] for edge in edges)


# --------------------------------------------------------------------------- bitwise, or not


def agreed(a: object, b: object, alike: bool = True) -> Agreement:
    return agreement(("p", "q"), [np.array(a)], [np.array(b)], ROUNDING, alike)


def test_kinds_of_agreement() -> None:
    assert agreed([1.0, 2.0], [1.0, 2.0]) == Agreement(("p", "q"), "bitwise", 0.0, True)
    assert agreed([1.0, 2.0], [1.0, 2.001]).kind == "rounding"
    assert agreed([1.0, 2.0], [1.0, 2.001]).relative == pytest.approx(0.001 / 2.001)
    assert agreed([1.0, 2.0], [1.0, 2.1]).kind == "different"
    assert agreed([0.0], [-0.0]).kind == "rounding"  # equal, but not the same bits
    assert agreed([float("nan")], [float("nan")]).kind == "bitwise"
    one = [np.array([1.0])]
    assert agreement(("p", "q"), one, one * 2, ROUNDING, True).kind == "different"


@pytest.mark.parametrize(
    ("a", "b"),
    [([1.0], [1.0, 2.0]), ([1.0], [float("nan")]), ([1.0], [float("inf")])],
)
def test_results_that_do_not_compare_are_different(a: list[float], b: list[float]) -> None:
    found = agreed(a, b)
    assert (found.kind, found.relative) == ("different", float("inf"))
    assert not found.passed
    assert agreed(a, b, alike=False).passed


def test_agreements_in_words() -> None:
    assert str(agreed([1.0], [1.0])) == "p and q: bitwise equal"
    assert str(agreed([1.0], [1.0005])) == "p and q: equal to rounding, at most 5.0e-04 apart"
    assert str(agreed([1.0], [2.0])) == "p and q: different by 5.0e-01"
