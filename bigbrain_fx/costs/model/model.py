"""A fitted model of op times: what `bigbrain-fx fit` writes and the estimator `learned` reads.

Forward, input gradients and weight gradients have a regression each, of the logarithm (base 2) of
measured seconds over those that `analytical` expects of the op alone: an op or a device unlike all
that was profiled is then about as expected, which a regression of seconds is not. With two stages,
the first predicts from shapes which share of the roofline an op reaches, and the second takes that
as one more feature.

Source of the two stages: Pham, Durillo and Fahringer, Predicting workflow task execution time in
the cloud using a two-stage machine learning approach (IEEE Transactions on Cloud Computing, 2020).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bigbrain_fx.costs.model.expected import expected_s
from bigbrain_fx.costs.model.features import (
    PHASES,
    ComputePlace,
    Floats,
    OpWork,
    Phase,
    PlaceRates,
    matrix,
    names,
    shape_columns,
)
from bigbrain_fx.costs.model.regressors import Regressor, from_json, to_json
from bigbrain_fx.errors import InputError

SHIPPED = Path(__file__).resolve().parent.parent / "shipped.json"
"""Fitted on a CPU with one thread: a base for CPUs that are not at hand."""

FORMAT = "bigbrain-fx cost model"
VERSION = 3
_OF_SECONDS = 2  # the version of 0.1.0: its regressions are of seconds

_LEAST, _MOST = math.log2(1e-9), math.log2(1e6)  # neither seconds nor factors are beyond


@dataclass(frozen=True)
class PhaseModel:
    """The regressions of one phase: of the share of the roofline, if there are two, and of time.

    `points` is how many times they were fitted to.
    """

    time: Regressor
    share: Regressor | None = None
    points: int = 0

    def logs(self, x: Floats, of_shapes: int) -> Floats:
        """Return what is predicted of each row; `of_shapes` columns are of the op alone."""
        return np.clip(self.time.predict(self.inputs(x, of_shapes)), _LEAST, _MOST)

    def inputs(self, x: Floats, of_shapes: int) -> Floats:
        """Return what the regression of time sees: the features, and the share if predicted."""
        if self.share is None:
            return x
        return np.column_stack([x, self.share.predict(x[:, :of_shapes])])


@dataclass(frozen=True)
class Correction:
    """What a few measured ops say of a new device: log2 of measured over forecast seconds.

    `device` is of every op, `families` are what some are off by besides.
    """

    device: float = 0.0
    families: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return what ops of a family are off by."""
        return self.device + self.families.get(name, 0.0)


@dataclass(frozen=True)
class CostModel:
    """The fitted regressions of an op's times, and what they were fitted on.

    Attributes:
        kind: "random-forest", ...; for people.
        families: those with a feature of their own.
        places: rates of the devices that were profiled.
        phases: by name; a phase of which nothing was measured is absent.
        optimizer_touches: how often an optimizer's step moves each byte of a parameter, in the
            middle of the places. optimizer_launches: what it costs for each tensor besides, in the
            device's launch_s. Both are 0.0 where it was not measured.
        correction: for another device than those; `costs.correct` makes it.
        of_seconds: predicts log2 of seconds instead, as 0.1.0 did.
    """

    kind: str
    families: tuple[str, ...]
    places: tuple[PlaceRates, ...]
    phases: Mapping[Phase, PhaseModel]
    optimizer_touches: float = 0.0
    optimizer_launches: float = 0.0
    correction: Correction = field(default_factory=Correction)
    of_seconds: bool = False

    @property
    def two_stage(self) -> bool:
        """Whether a share of the roofline is predicted first."""
        return any(stages.share is not None for stages in self.phases.values())

    def seconds(self, phase: Phase, works: Sequence[OpWork], place: ComputePlace) -> Floats:
        """Return the seconds of one phase of every op on a device, shape (ops,).

        Features are those of the nearest device within the range of what was profiled, as
        regressions do not extrapolate; what is expected is of the device itself.

        Raises:
            InputError: no device of this kind was profiled, or nothing of this phase.
        """
        rates = PlaceRates.of(place)
        self._require(phase, rates)
        if not works:
            return np.zeros(0)
        near = rates.within(self.places)
        x = matrix(works, [near] * len(works), self.families, with_rates=self.of_seconds)
        logs = self.phases[phase].logs(x, shape_columns(self.families))
        own = np.array([self.correction.of(work.family) for work in works])
        if self.of_seconds:
            scale = [work.roofline_s(rates) / work.roofline_s(near) for work in works]
        else:
            scale = [expected_s(work, place)[phase] for work in works]
        found: Floats = np.array(scale) * np.exp2(logs + own)
        return found

    def _require(self, phase: Phase, rates: PlaceRates) -> None:
        kinds = sorted({place.kind for place in self.places})
        if rates.kind not in kinds:
            raise InputError(
                f"the learned costs are of {', '.join(kinds)} devices, not of {rates.kind}",
                code="BX1456",
                help=f"profile a {rates.kind} device, merge, and fit again; "
                "or use --estimator analytical",
            )
        if phase not in self.phases:
            raise InputError(
                f"the learned costs say nothing of the phase '{phase}'",
                code="BX1457",
                help="profile a model that trains, and fit again",
            )


def write_model(model: CostModel, path: Path) -> None:
    """Write a model as JSON; whatever was there is replaced as a whole."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "kind": model.kind,
        "families": list(model.families),
        "places": [asdict(place) for place in model.places],
        "optimizer_touches": model.optimizer_touches,
        "optimizer_launches": model.optimizer_launches,
        "correction": asdict(model.correction),
        "of_seconds": model.of_seconds,
        "features": list(names(model.families)),
        "phases": {name: _stages_json(stages) for name, stages in model.phases.items()},
    }
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(json.dumps(body) + "\n")
    scratch.replace(path)


def read_model(path: Path) -> CostModel:
    """Read what `write_model` wrote.

    Raises:
        InputError: no such file, another file, or one of another version.
    """
    body = _read(path)
    if body.get("version") == _OF_SECONDS:
        body |= {"correction": asdict(Correction()), "of_seconds": True}
    elif body.get("version") != VERSION:
        raise _wrong(
            path, f"expected version {VERSION}, found {body.get('version')}", code="BX1458"
        )
    try:
        model = CostModel(
            kind=str(body["kind"]),
            families=tuple(map(str, body["families"])),
            places=tuple(PlaceRates(**place) for place in body["places"]),
            phases={
                name: _stages(body["phases"][name]) for name in PHASES if name in body["phases"]
            },
            optimizer_touches=float(body["optimizer_touches"]),
            optimizer_launches=float(body["optimizer_launches"]),
            correction=_correction(body["correction"]),
            of_seconds=bool(body["of_seconds"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(
            path, f"it is damaged: {type(error).__name__}: {error}", code="BX1459"
        ) from error
    if body.get("features") != list(names(model.families)):
        raise _wrong(path, "its features are not those of this bigbrain-fx", code="BX1460")
    _check_columns(path, model)
    return model


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"expected learned costs, found no readable file: {error.strerror or error}",
            code="BX1461",
            at=str(path),
            help="bigbrain-fx fit profiles.sqlite --out costs.json writes one",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "it is no JSON", code="BX1462") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _wrong(path, "it is another file", code="BX1463")
    return body


def _check_columns(path: Path, model: CostModel) -> None:
    wide = len(names(model.families))
    for name, stages in model.phases.items():
        extra = 0 if stages.share is None else 1
        if stages.time.columns != wide + extra:
            raise _wrong(
                path,
                f"'{name}' takes {stages.time.columns} features, not {wide + extra}",
                code="BX1464",
            )
        if stages.share is not None and stages.share.columns != shape_columns(model.families):
            raise _wrong(
                path,
                f"the first stage of '{name}' takes {stages.share.columns} features",
                code="BX1465",
            )


def _correction(found: Mapping[str, Any]) -> Correction:
    made = Correction(
        float(found["device"]),
        {str(name): float(log) for name, log in found["families"].items()},
    )
    if not all(_LEAST <= log <= _MOST for log in (made.device, *made.families.values())):
        raise ValueError("a correction beyond all measure")
    return made


def _wrong(path: Path, why: str, *, code: str) -> InputError:
    return InputError(
        f"expected learned costs: {why}",
        code=code,
        at=str(path),
        help="fit again: bigbrain-fx fit profiles.sqlite --out costs.json",
    )


def _stages_json(stages: PhaseModel) -> dict[str, Any]:
    share = None if stages.share is None else to_json(stages.share)
    return {"points": stages.points, "share": share, "time": to_json(stages.time)}


def _stages(found: Mapping[str, Any]) -> PhaseModel:
    share = None if found["share"] is None else from_json(found["share"])
    return PhaseModel(from_json(found["time"]), share, int(found["points"]))
