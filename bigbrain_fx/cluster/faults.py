"""Errors of pydantic as our own, which name the place, the fault and its cure.

This module translates; it decides nothing about what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from bigbrain_fx.cluster.document import Document, JsonPath
from bigbrain_fx.cluster.file import (
    BetweenEntry,
    ClusterFile,
    DeviceEntry,
    HostEntry,
    LinkEntry,
    LinksEntry,
    OverheadsEntry,
    StoreEntry,
    ZoneEntry,
)
from bigbrain_fx.cluster.quantity import BadValueError, nearest, quoted
from bigbrain_fx.errors import InputError

_ENTRIES: Mapping[tuple[str, ...], type[BaseModel]] = {
    (): ClusterFile,
    ("devices", "*"): DeviceEntry,
    ("devices", "*", "overheads"): OverheadsEntry,
    ("hosts", "*"): HostEntry,
    ("stores", "*"): StoreEntry,
    ("zones", "*"): ZoneEntry,
    ("links",): LinksEntry,
    ("links", "default"): LinkEntry,
    ("links", "same_host"): LinkEntry,
    ("links", "between_zones"): LinkEntry,
    ("links", "between", "*"): BetweenEntry,
}

_EXAMPLES: Mapping[str, str] = {
    "name": '"name": "d0"',
    "devices": '"devices": [{"name": "d0", "preset": "h200"}]',
    "bandwidth": '"bandwidth": "10Gbit/s"',
    "latency": '"latency": "50us"',
    "device": '"device": "d0"',
    "capacity": '"capacity": "64GiB"',
}

_SHAPES: Mapping[str, str] = {
    "model_type": "an object { ... }",
    "model_attributes_type": "an object { ... }",
    "dict_type": "an object { ... }",
    "list_type": "a list [ ... ]",
    "string_type": 'a text in "quotes"',
    "int_type": "a whole number",
    "int_from_float": "a whole number",
}

_SHOWN = 4  # further faults are named by place only; a long list hides the first


@dataclass(frozen=True, slots=True)
class _Fault:
    """One fault of a file: where, what is wrong, what to do, and the code of the sentence."""

    path: JsonPath
    what: str
    help: str
    code: str


def file_error(document: Document, error: ValidationError) -> InputError:
    """Turn the first fault, in file order, into the user's error; the others become notes."""
    order = {path: i for i, path in enumerate(document.lines)}  # it was filled in file order
    faults = sorted(
        (_fault(detail) for detail in error.errors()),
        key=lambda fault: order[document.known(fault.path)],
    )
    first, *others = faults
    notes = tuple(
        f"also {document.at(other.path)}: {other.what}{_near(other.help)}"
        if other.path
        else f"also: {other.what}"
        for other in others[:_SHOWN]
    )
    if len(others) > _SHOWN:
        notes += (f"and {len(others) - _SHOWN} more",)
    return document.error(first.path, first.what, first.help, notes, code=first.code)


def _near(help: str) -> str:
    """Return the question in a help, for a note: ' (did you mean "links"?)'."""
    question, mark, _ = help.partition("? ")
    return f" ({question}?)" if mark and question.startswith("did you mean") else ""


def _fault(detail: Any) -> _Fault:  # noqa: ANN401  # pydantic's ErrorDetails: untyped context
    """Return what one entry of pydantic's list says."""
    path: JsonPath = detail["loc"]
    fault = partial(_Fault, path)
    context = detail.get("ctx", {})
    found = quoted(detail["input"])
    match detail["type"]:
        case "value_error" if isinstance(context["error"], BadValueError):
            error = context["error"]
            return fault(error.what, error.help, code=error.code)
        case "missing":
            name = str(path[-1])
            return fault(
                "this field is missing", f"add {_EXAMPLES.get(name, quoted(name))}", code="BX1014"
            )
        case "extra_forbidden":
            return fault(f"unknown field {quoted(path[-1])}", _known_fields(path), code="BX1015")
        case "literal_error":
            which = context["expected"]
            return fault(
                f"expected {which}, found {found}",
                "write " + which.replace("'", '"'),
                code="BX1016",
            )
        case "too_short" if path == ("devices",):
            return fault(
                "the cluster has no devices", f"add one: {_EXAMPLES['devices']}", code="BX1017"
            )
        case "too_short" if path[0] == "zones":
            return fault(
                "a zone without a host", 'name one at least: "hosts": ["a"]', code="BX1057"
            )
        case "too_short" | "too_long" if path[-1] in ("devices", "hosts", "zones") and path[1:]:
            return fault(
                f"expected two names, found {len(detail['input'])}",
                'like ["a", "b"]',
                code="BX1018",
            )
        case "too_long":
            most = context["max_length"]
            return fault(
                f"more than {most} devices", f"describe at most {most} devices", code="BX1019"
            )
        case "greater_than_equal" | "less_than_equal":
            return fault(
                f"expected 1 to 4096, found {found}", f'for example "{path[-1]}": 1', code="BX1020"
            )
        case kind if kind in _SHAPES:
            return fault(
                f"expected {_SHAPES[kind]}, found {found}",
                "see `bigbrain-fx schema`",
                code="BX1021",
            )
        case _:
            return fault(
                f"{detail['msg']}, found {found}", "see `bigbrain-fx schema`", code="BX1022"
            )


def _known_fields(path: JsonPath) -> str:
    key = tuple("*" if isinstance(part, int) else part for part in path[:-1])
    fields = [field.alias or name for name, field in _ENTRIES[key].model_fields.items()]
    near = nearest(str(path[-1]), fields)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f"{hint}known here: {', '.join(field for field in fields if field[0] != '$')}"
