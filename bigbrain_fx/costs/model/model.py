"""A fitted model of op times: what `bigbrain-fx fit` writes and the estimator `learned` reads.

Forward, input gradients and weight gradients have a regression each. It predicts the logarithm
(base 2) of measured seconds over those that `analytical` expects of the op alone. A new kind of op
or device is then about as expected, which a regression of seconds is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from bigbrain_fx.costs.model.expected import expected_s
from bigbrain_fx.costs.model.features import (
    ComputePlace,
    Floats,
    OpWork,
    Phase,
    PlaceRates,
    matrix,
    names,
)
from bigbrain_fx.costs.model.regressors import Regressor, Strict
from bigbrain_fx.errors import InputError

SHIPPED = Path(__file__).resolve().parent.parent / "shipped.json"
"""Fitted on a CPU with one thread: a base for CPUs that are not at hand."""

FORMAT: Final = "bigbrain-fx cost model"
VERSION: Final = 3

_LEAST, _MOST = math.log2(1e-9), math.log2(1e6)  # neither seconds nor factors are beyond
_Factor = Annotated[float, Field(ge=_LEAST, le=_MOST)]


class PhaseModel(Strict):
    """The regression of one phase, and how many times it was fitted to.

    `share` is null: files of 0.2.0 may have a regression there, which their forecast goes through.
    """

    points: int = 0
    share: None = None
    time: Regressor

    def logs(self, x: Floats) -> Floats:
        """Return what is predicted of each row."""
        return np.clip(self.time.predict(x), _LEAST, _MOST)


class Correction(Strict):
    """Correction for a new device by a few measured ops: log2 of measured over forecast seconds.

    `device` is of every op, `families` are what some are off by besides.
    """

    device: _Factor = 0.0
    families: Mapping[str, _Factor] = Field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return what ops of a family are off by."""
        return self.device + self.families.get(name, 0.0)


class CostModel(Strict):
    """The fitted regressions of an op's times, and what they were fitted on.

    Attributes:
        kind: "boosting", ...; for people.
        families: those with a feature of their own.
        places: rates of the devices that were profiled.
        optimizer_touches: how often an optimizer's step moves each byte of a parameter, in the
            middle of the places. optimizer_launches: what it costs for each tensor besides, in the
            device's launch_s. Both are 0.0 where it was not measured.
        correction: for another device than those; `costs.correct` makes it.
        of_seconds: false; of 0.1.0, which predicted log2 of seconds.
        features: the columns that the regressions take, in order.
        phases: by name; a phase of which nothing was measured is absent.
    """

    format: Literal["bigbrain-fx cost model"] = FORMAT
    version: Literal[3] = VERSION
    kind: str
    families: tuple[str, ...]
    places: tuple[PlaceRates, ...]
    optimizer_touches: float = 0.0
    optimizer_launches: float = 0.0
    correction: Correction = Correction()
    of_seconds: Literal[False] = False
    features: tuple[str, ...]
    phases: Mapping[Phase, PhaseModel]

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.features != names(self.families):
            raise ValueError("its features are not those of this bigbrain-fx")
        for name, phase in self.phases.items():
            if phase.time.columns != len(self.features):
                found, wanted = phase.time.columns, len(self.features)
                raise ValueError(f"'{name}' takes {found} features, not {wanted}")
        return self

    def seconds(self, phase: Phase, works: Sequence[OpWork], place: ComputePlace) -> Floats:
        """Return the seconds of one phase of every op on a device, shape (ops,).

        Features are those of the nearest device within the profiled range, as regressions do not
        extrapolate; the expected seconds are of the device itself.

        Raises:
            InputError: no device of this kind was profiled, or nothing of this phase.
        """
        rates = PlaceRates.of(place)
        self._require(phase, rates)
        if not works:
            return np.zeros(0)
        near = rates.within(self.places)
        logs = self.phases[phase].logs(matrix(works, [near] * len(works), self.families))
        own = np.array([self.correction.of(work.family) for work in works])
        expected = np.array([expected_s(work, place)[phase] for work in works])
        found: Floats = expected * np.exp2(logs + own)
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
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(json.dumps(model.model_dump()) + "\n")
    scratch.replace(path)


def read_model(path: Path) -> CostModel:
    """Read what `write_model` wrote.

    Raises:
        InputError: no such file, another file, or one of another version.
    """
    body = _read(path)
    if body.get("version") != VERSION:
        raise _wrong(
            path, f"expected version {VERSION}, found {body.get('version')}", code="BX1458"
        )
    try:
        return CostModel.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its columns"
        raise _wrong(path, f"it is damaged at {place}: {first['msg']}", code="BX1459") from error


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


def _wrong(path: Path, why: str, *, code: str) -> InputError:
    return InputError(
        f"expected learned costs: {why}",
        code=code,
        at=str(path),
        help="fit again: bigbrain-fx fit profiles.sqlite --out costs.json",
    )
