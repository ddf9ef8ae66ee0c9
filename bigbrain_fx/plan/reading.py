"""plan.json, or a bundle folder -> Plan, and back. Errors name the broken field."""

from __future__ import annotations

import difflib
import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from pydantic import ValidationError

from bigbrain_fx.core import once
from bigbrain_fx.errors import FormatWarning, InputError, os_error_as
from bigbrain_fx.plan.nouns import FORMAT, Plan, plan_adapter, to_json
from bigbrain_fx.weights import replace_file

READABLE = (1, FORMAT)
_EARLIER = (
    "{} has plan format {}, of an earlier version; fields that it lacks have their defaults, and "
    f"`bigbrain-fx split` writes format {FORMAT}"
)
_UNREAD = "{} has fields of another version, which are not read: {}"


_BUNDLE = "give a bundle folder or a plan.json"
_OF_MODEL = (
    "this is a model file: give the bundle that `bigbrain-fx split MODEL.py --devices "
    "cluster.json` writes"
)


def from_json(text: bytes, where: str) -> Plan:
    """Read a plan; warn of one of an earlier format.

    Raises:
        InputError: not a plan, or of a newer format; names the field.
    """
    names = _require_format(text, where)
    try:
        plan = plan_adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"not a plan: {first['msg']}",
            code="BX1260",
            at=f"{where}: {at}",
            help=_OF_MODEL if where.endswith(".py") else "make it again with `bigbrain-fx split`",
        ) from error

    _warn_of_age(plan, names, where)
    plan = replace(plan, format=FORMAT)  # fields that an earlier one lacks have defaults
    plan.__dict__["key"] = hashlib.sha256(text).hexdigest()[:16]  # of the plan as it was written
    return plan


def _warn_of_age(plan: Plan, names: Iterable[str], where: str) -> None:
    unread = sorted(set(names) - {field.name for field in fields(plan)})
    if plan.format != FORMAT:
        warnings.warn(_EARLIER.format(where, plan.format), FormatWarning, stacklevel=3)
    if unread:
        warnings.warn(_UNREAD.format(where, ", ".join(unread)), FormatWarning, stacklevel=3)


def _require_format(text: bytes, where: str) -> Iterable[str]:
    """Look at the format first: a newer one may have other fields. Return the names of fields."""
    try:
        found = json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return ()  # the reader says where it is broken
    except ValueError as error:
        raise InputError(
            f"not a plan: {error}",
            code="BX1261",
            at=where,
            help="make it again with `bigbrain-fx split`",
        ) from error
    number = found.get("format", FORMAT) if isinstance(found, dict) else FORMAT
    if number not in READABLE:
        raise InputError(
            f"plan format {number!r} is not {FORMAT}",
            code="BX1262",
            at=where,
            help="use the bigbrain-fx that wrote it, or make it again with `bigbrain-fx split`",
        )
    return tuple(found) if isinstance(found, dict) else ()


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan for `explain` and `simulate`; the file is there whole, or not at all.

    Raises:
        InputError: it cannot be written.
    """
    with os_error_as(f"cannot write {path}", code="BX1263", help="give a file that can be written"):
        replace_file(Path(path), to_json(plan))


def read_plan(path: str | Path) -> Plan:
    """Read plan.json, or the plan of a bundle folder.

    Raises:
        InputError: there is none, it is broken, or of another format.
    """
    path = Path(path)
    file = path / "plan.json" if path.is_dir() else path
    try:
        if path.is_dir() and file.exists() and not file.is_file():
            raise OSError(None, "it is no file")  # reading a pipe would wait for ever
        text = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror or error}",
            code="BX1264",
            help=_instead_of(path),
        ) from error
    return from_json(text, str(file))


def _instead_of(path: Path) -> str:
    """Return what to give where a path has no plan."""
    if path.is_dir():
        return "give a bundle; if this is one, files of it are missing: copy it, or split, again"
    try:
        bundles = [each.name for each in path.parent.iterdir() if (each / "plan.json").is_file()]
    except OSError:
        bundles = []
    close = difflib.get_close_matches(path.name, bundles, n=1, cutoff=0.5)
    return f"did you mean {path.parent / close[0]}?" if close else _BUNDLE
