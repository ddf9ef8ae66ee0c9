"""A file of which devices are there when -> `Period`s, or what is wrong with it.

    {"format": "availability-1", "until_h": 8, "changes": [
      {"from_h": 0, "devices": ["a0", "a1", "b0"]}, {"from_h": 2.5, "devices": ["a0", "a1"]}]}

Each list of devices holds until the next one. It knows the file; what a loss does to a training is
`plan.availability`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bigbrain_fx.cluster.quantity import nearest, quoted
from bigbrain_fx.core import Cluster, Period
from bigbrain_fx.errors import InputError, os_error_as

_MOST_BYTES = 16 << 20
_EXAMPLE = (
    '{"format": "availability-1", "until_h": 8, "changes": [{"from_h": 0, "devices": ["d0"]}]}'
)
Hours = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Change(_Strict):
    from_h: Hours
    devices: tuple[str, ...]


class _Trace(_Strict):
    format: Literal["availability-1"]
    until_h: Hours
    changes: tuple[_Change, ...] = Field(min_length=1)


def read_availability(path: str | Path, cluster: Cluster) -> tuple[Period, ...]:
    """Read which devices of a cluster are there when.

    Raises:
        InputError: it is unreadable, a field is wrong, a device is unknown, hours do
            not ascend from 0, or a time has no device.
    """
    with os_error_as(
        "cannot read the trace", code="BX1059", at=str(path), help=f"write one like {_EXAMPLE}"
    ):
        data = Path(path).read_bytes()[: _MOST_BYTES + 1]
    try:
        found = _Trace.model_validate_json(data)
    except ValidationError as error:
        raise _field_error(path, error) from error
    ends = [*(change.from_h for change in found.changes[1:]), found.until_h]
    _require_ascending(path, [found.changes[0].from_h, *ends])
    for number, change in enumerate(found.changes):
        _require_devices(path, number, change, ends[number], cluster)
    starts = (change.from_h for change in found.changes)
    each = zip(starts, ends, (change.devices for change in found.changes), strict=True)
    return tuple(Period(start, end, tuple(dict.fromkeys(names))) for start, end, names in each)


def _field_error(path: str | Path, error: ValidationError) -> InputError:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the file"
    return InputError(
        f"{place} of the trace: {first['msg']}",
        code="BX1060",
        at=str(path),
        help=f"write it like {_EXAMPLE}",
    )


def _require_ascending(path: str | Path, hours: Sequence[float]) -> None:
    """Refuse hours that do not begin at 0, or that do not ascend up to `until_h`."""
    named = [*(f"changes[{n}].from_h" for n in range(len(hours) - 1)), "until_h"]
    if hours[0]:
        raise InputError(
            f"changes[0].from_h is {hours[0]:g}, and a trace begins at 0",
            code="BX1061",
            at=str(path),
            help='write "from_h": 0 in the first change',
        )
    for number, (before, after) in enumerate(pairwise(hours), 1):
        if after <= before:
            raise InputError(
                f"{named[number]} is {after:g}, and {named[number - 1]} before it is {before:g}",
                code="BX1062",
                at=str(path),
                help="list changes in order of their hours, and let until_h be the last",
            )


def _require_devices(
    path: str | Path, number: int, change: _Change, end_h: float, cluster: Cluster
) -> None:
    """Refuse a change without a device, or with one that the cluster does not have."""
    if not change.devices:
        raise InputError(
            f"no device is there from {change.from_h:g} h to {end_h:g} h",
            code="BX1063",
            at=f"{path}: changes[{number}].devices",
            help="name a device that you would keep, or simulate what is before and after it apart",
        )
    for name in change.devices:
        if name not in cluster.device:
            near = nearest(name, list(cluster.device))
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise InputError(
                f"the cluster has no device {quoted(name)}",
                code="BX1064",
                at=f"{path}: changes[{number}].devices",
                help=f"{hint}known: {', '.join(list(cluster.device)[:8])}",
            )
