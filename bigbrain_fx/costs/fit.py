"""Profiles -> a fitted model of op times. The only file that knows scikit-learn.

What scikit-learn fits is taken apart into arrays (`cost_model`): the file that is written needs
neither scikit-learn nor pickle to be used.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bigbrain_fx.costs.model import (
    LEAF,
    LEAST_S,
    PHASES,
    CostModel,
    Floats,
    Linear,
    OpWork,
    Phase,
    PhaseModel,
    PlaceRates,
    Regressor,
    Trees,
    expected_s,
    matrix,
    names,
    write_model,
)
from bigbrain_fx.costs.profiles import Machine, OpProfile, ProfileStore
from bigbrain_fx.errors import InputError

Row: TypeAlias = tuple[Machine, OpProfile]
Learner: TypeAlias = Callable[[Floats, Floats], Regressor]

DEFAULT = "boosting"
FOLDS = 5
FEWEST_TIMES = 2 * FOLDS
FEWEST_OPS = 3 * FOLDS  # without a fifth of them there are still enough to fit

_SEED = 0


@dataclass(frozen=True)
class FitReport:
    """A fit, and its error on ops that it did not see.

    `mape` and `median` are shares, of seconds; each time was predicted by a fit without its fifth
    of the signatures. `missing` are phases of which too little was measured: they stay as
    `analytical` has them.
    """

    model: CostModel
    machines: tuple[str, ...]
    times: int
    mape: float
    median: float
    missing: tuple[Phase, ...] = ()


def fit_file(profiles: Path, out: Path, kind: str = DEFAULT) -> FitReport:
    """Fit a model, one of `MODELS`, to all of a database of `bigbrain-fx profile`; write it.

    Raises:
        InputError: no scikit-learn, no such model, no database, or too few profiles.
    """
    rows = ProfileStore(profiles, read_only=True).rows()
    report = assess(rows, kind)
    write_model(report.model, out)
    return report


def assess(rows: Sequence[Row], kind: str) -> FitReport:
    """Fit a model to all rows, and say how far off such a model is on rows it did not see."""
    model = fit(rows, kind)
    errors = [abs(guess / real - 1.0) for guess, real in crosswise(rows, kind)]
    if not errors:
        raise _too_few(FEWEST_OPS, len(rows))
    missing = tuple(
        phase
        for phase in PHASES
        if phase not in model.phases and any(has(profile, phase) for _, profile in rows)
    )
    machines = tuple(sorted({machine.key for machine, _ in rows}))
    times = sum(stages.points for stages in model.phases.values())
    mape, middle = statistics.fmean(errors), statistics.median(errors)
    return FitReport(model, machines, times, mape, middle, missing)


def crosswise(rows: Sequence[Row], kind: str) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds of every time, each predicted without its fifth."""
    fold = folds([profile.signature.key for _, profile in rows])
    found: list[tuple[float, float]] = []
    for held in range(FOLDS):
        seen = [row for row, own in zip(rows, fold, strict=True) if own != held]
        unseen = [row for row, own in zip(rows, fold, strict=True) if own == held]
        if sum(has(profile, "forward") for _, profile in seen) >= FEWEST_TIMES:
            found.extend(predictions(fit(seen, kind), unseen))
    return found


def predictions(model: CostModel, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds of every measured phase of some rows."""
    found: list[tuple[float, float]] = []
    for phase in PHASES:
        for machine in {machine.key: machine for machine, _ in rows}.values():
            timed = [p for m, p in rows if m.key == machine.key and is_measured(p, phase)]
            if not timed or phase not in model.phases:
                continue
            guesses = model.seconds(phase, [work_of(p) for p in timed], machine)
            measured = [seconds_of(p, phase) for p in timed]
            found.extend(zip(map(float, guesses), measured, strict=True))
    return found


def has(profile: OpProfile, phase: Phase) -> bool:
    """Whether an op has a phase at all; a size has none."""
    graded = [t.is_parameter for t in profile.signature.tensors if t.wants_grad]
    match phase:
        case "forward":
            return bool(profile.signature.outputs)
        case "backward_input":
            return False in graded
    return True in graded


def is_measured(profile: OpProfile, phase: Phase) -> bool:
    """Whether an op has a phase, and the phase took long enough to be measured."""
    return has(profile, phase) and seconds_of(profile, phase) > LEAST_S


def fit(rows: Sequence[Row], kind: str) -> CostModel:
    """Fit the regressions of every phase of which enough was measured.

    Args:
        rows: what was measured.
        kind: one of `MODELS`.

    Raises:
        InputError: no scikit-learn, no such model, or too few profiles.
    """
    learner = _learner(kind)
    works = [work_of(profile) for _, profile in rows]
    families = tuple(sorted({work.family for work in works}))
    phases: dict[Phase, PhaseModel] = {}
    for phase in PHASES:
        timed = [row for row in rows if has(row[1], phase)]
        if len(timed) >= FEWEST_TIMES:
            phases[phase] = _fit_phase(timed, phase, families, learner)
    if "forward" not in phases:
        raise _too_few(FEWEST_TIMES, len(rows))
    machines = {machine.key: machine for machine, _ in rows}
    places = tuple(PlaceRates.of(machines[key]) for key in sorted(machines))
    touches, launches = optimizer_of(machines.values())
    return CostModel(
        kind=kind,
        families=families,
        places=places,
        optimizer_touches=touches,
        optimizer_launches=launches,
        features=names(families),
        phases=phases,
    )


def _too_few(wanted: int, count: int) -> InputError:
    return InputError(
        f"expected at least {wanted} measured ops, found {count}",
        code="BX1453",
        help="profile more models, or more sizes: bigbrain-fx profile model.py --rows 4,8,16",
    )


def optimizer_of(machines: Iterable[Machine]) -> tuple[float, float]:
    """Return how often a step moves each byte, and the launches of each tensor; the medians."""
    known = [machine for machine in machines if machine.knows_optimizer]
    if not known:
        return 0.0, 0.0
    touches = [m.optimizer_s_per_byte * m.memory_bytes_per_s for m in known]
    launches = [m.optimizer_s_per_tensor / m.launch_s for m in known]
    return statistics.median(touches), statistics.median(launches)


def work_of(profile: OpProfile) -> OpWork:
    """Return what was measured as an op to be priced."""
    return OpWork(profile.signature, profile.flops, profile.reads_bytes, profile.writes_bytes)


def seconds_of(profile: OpProfile, phase: Phase) -> float:
    """Return the measured seconds of one phase; what was too short to be measured as that."""
    return max(LEAST_S, float(getattr(profile, f"{phase}_s")))


def _fit_phase(
    rows: Sequence[Row], phase: Phase, families: tuple[str, ...], learner: Learner
) -> PhaseModel:
    works = [work_of(profile) for _, profile in rows]
    x = matrix(works, [PlaceRates.of(machine) for machine, _ in rows], families)
    seconds = np.array([seconds_of(profile, phase) for _, profile in rows])
    pairs = zip(works, rows, strict=True)
    expected = np.array([expected_s(work, machine)[phase] for work, (machine, _) in pairs])
    return PhaseModel(points=len(rows), time=learner(x, np.log2(seconds / expected)))


def folds(keys: Sequence[str]) -> list[int]:
    """Return a fold, 0 to `FOLDS` - 1, for every key; equal keys share it. Always the same."""
    distinct = sorted(set(keys))
    order = np.random.default_rng(_SEED).permutation(len(distinct))
    fold = {distinct[i]: int(at) % FOLDS for at, i in enumerate(order)}
    return [fold[key] for key in keys]


# --------------------------------------------------------------------------- scikit-learn


def _learner(kind: str) -> Learner:
    if importlib.util.find_spec("sklearn") is None:
        raise InputError(
            "expected scikit-learn, found none", code="BX1454", help="pip install 'bigbrain-fx[ml]'"
        )
    if kind not in MODELS:
        raise InputError(
            f"there is no model '{kind}' to fit",
            code="BX1455",
            help=f"choose one of {', '.join(MODELS)}",
        )
    return MODELS[kind]


def _scaled(x: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mean and the standard deviation (1 for a constant) of every column, and x so."""
    center, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-12, scale, 1.0)
    return center, scale, (x - center) / scale


def _linear(x: Floats, target: Floats) -> Regressor:
    from sklearn.linear_model import Ridge

    center, scale, scaled = _scaled(x)
    made = Ridge(alpha=1.0).fit(scaled, target)
    intercept = float(made.intercept_)
    return Linear(center=center, scale=scale, coefficients=made.coef_, intercept=intercept)


def _boosting(x: Floats, target: Floats) -> Regressor:
    from sklearn.ensemble import GradientBoostingRegressor

    made = GradientBoostingRegressor(
        n_estimators=200,
        learning_rate=0.08,
        max_depth=4,
        subsample=0.7,
        max_features=1 / 3,
        random_state=_SEED,
    ).fit(x, target)
    base = float(np.ravel(made.init_.constant_)[0])
    trees = [tree.tree_ for tree in made.estimators_[:, 0]]
    return _joined(trees, base, made.learning_rate)


def _joined(trees: Sequence[Any], base: float, weight: float) -> Trees:
    """Return scikit-learn's trees as one list of nodes."""
    roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]

    def every(name: str) -> Any:  # noqa: ANN401  # of Cython's trees, untyped
        return np.concatenate([getattr(tree, name) for tree in trees])

    def children(name: str) -> Any:  # noqa: ANN401
        own = [(getattr(tree, name), at) for tree, at in zip(trees, roots, strict=True)]
        return np.concatenate([np.where(to == -1, LEAF, to + at) for to, at in own])

    left = children("children_left")
    return Trees(
        roots=roots,
        feature=np.where(left == LEAF, LEAF, every("feature")),
        threshold=every("threshold"),
        left=left,
        right=children("children_right"),
        value=every("value")[:, 0, 0],
        base=base,
        weight=weight,
        columns=int(trees[0].n_features),
    )


MODELS: Mapping[str, Learner] = {
    "linear": _linear,
    "boosting": _boosting,
}
"""What can be fitted: ridge regression and gradient boosting. Their options were set once, by eye;
support vectors and forests were no better at a model not seen
(tools/studies/compare_estimators)."""
