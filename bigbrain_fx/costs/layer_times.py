"""A file of seconds that layers took, which others measured -> `LayerTimes`, or what is wrong.

    {"format": "layer-times-1", "layers": [
      {"modules": ["blocks.*"], "parameters": 12596224, "times": [
        {"card": "a100-40", "rows": 8, "tensor": 1,
         "forward": 0.0162, "backward": 0.045, "update": 0.0029}]}]}

`modules` are paths of the model, a class's name (each of its modules), or "loss" for what no module
computes. `*` stands for one part of a path: each module is then a layer. Several are one layer.
Seconds are of one micro-batch of so many rows, on one device of a tensor group of so many. With
`tensor` above 1 they include what the group sends. `inputs` says what a row of the batch is. It
knows the file; what its seconds mean to a forecast is an estimator's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bigbrain_fx.errors import InputError, os_error_as

LOSS = "loss"
"""What stands for the ops that no module computes."""
_MOST_BYTES = 16 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LayerTime(_Strict):
    """Seconds of one layer for one micro-batch; `update` is of the optimizer, once a step."""

    card: str = Field(min_length=1)
    rows: int = Field(gt=0)
    tensor: int = Field(default=1, gt=0)
    forward: float = Field(ge=0, allow_inf_nan=False)
    backward: float = Field(ge=0, allow_inf_nan=False)
    update: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class Layer(_Strict):
    """A layer that was timed as a whole, and the numbers that it trains on a device of its own."""

    modules: tuple[str, ...] = Field(min_length=1)
    parameters: int | None = Field(default=None, ge=0)
    times: tuple[LayerTime, ...] = Field(min_length=1)


class LayerTimes(_Strict):
    """All of a file. `inputs`: by name, the shape of one row."""

    format: Literal["layer-times-1"]
    comment: str = Field(default="", alias="$comment")
    inputs: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    layers: tuple[Layer, ...] = Field(min_length=1)

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards that anything was timed on."""
        return tuple(dict.fromkeys(t.card for layer in self.layers for t in layer.times))


def read_layer_times(path: str | Path) -> LayerTimes:
    """Read a file of layers' times.

    Raises:
        InputError: it cannot be read, is no JSON, or a field is missing, unknown, or negative.
    """
    found = Path(path).resolve()
    with os_error_as(
        "cannot read the profile of layers",
        code="BX1470",
        at=str(path),
        help="name a file of seconds by layer: docs/how-to/choose-a-plan.md, --profile",
    ):
        state = found.stat()
    return _read(str(found), (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=4)
def _read(path: str, state: tuple[int, int]) -> LayerTimes:
    if state[1] > _MOST_BYTES:
        raise InputError(
            f"the profile of layers has {state[1]:,} bytes, and at most {_MOST_BYTES:,} are read",
            code="BX1471",
            at=path,
            help="leave out cards and sizes that the cluster and the batch do not have",
        )
    try:
        return LayerTimes.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise _fault(path, error) from error


def _fault(path: str, error: ValidationError) -> InputError:
    first = error.errors()[0]
    if first["type"] != "json_invalid":
        return _field_error(path, error)
    return InputError(
        f"the profile of layers is no JSON: {first['ctx']['error']}",
        code="BX1472",
        at=path,
        help="write it by json.dump; tools/studies/sailor_peer converts Sailor's profiles",
    )


def _field_error(path: str, error: ValidationError) -> InputError:
    """Return the first fault, with its place in the file."""
    first = error.errors()[0]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    found = json.dumps(first["input"], default=str)[:60]
    more = f"; {error.error_count() - 1} more faults" if error.error_count() > 1 else ""
    missing = first["type"] == "missing"
    return InputError(
        f"{place}: {'the field is missing' if missing else first['msg']}"
        + ("" if missing else f", found {found}")
        + more,
        code="BX1473",
        at=path,
        help="each time has card, rows, forward and backward, in seconds from 0 on",
    )
