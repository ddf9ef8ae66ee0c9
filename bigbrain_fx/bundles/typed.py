"""A dataclass as a program filled it -> each value of its field's type, or a refusal.

    Options(recompute=[0, 2], micro_batches="4")  ──▶  recompute=(0, 2), micro_batches=4
    Options(offload="state")                      ──▶  InputError: expected a valid tuple

A command line has one type for each option; Python takes anything. The module checks types, and not
the meaning of values.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

    Given = TypeVar("Given", bound=DataclassInstance)


def of_its_types(given: Given, *, but: tuple[str, ...] = ()) -> Given:
    """Return the same with lists as tuples, paths of strings, numbers of digits.

    Args:
        given: an instance of a frozen dataclass.
        but: fields that are left as they are.

    Raises:
        InputError: a value is not of its field's type.
    """
    read = {each.name: _read(given, each.name) for each in fields(given) if each.name not in but}
    return replace(given, **read)


def _read(given: DataclassInstance, name: str) -> object:
    from pydantic import ValidationError

    value = getattr(given, name)
    try:
        return _reader(type(given), name).validate_python(value)
    except ValidationError as error:
        whys = [entry["msg"].removeprefix("Input should be ") for entry in error.errors()]
        expected = " or ".join(dict.fromkeys(whys))
        raise InputError(
            f"{type(given).__name__}({name}={value!r}): expected {expected}",
            code="BX3146",
            help=f"{name} is of type {_told(type(given), name)}",
        ) from None


@cache
def _reader(cls: type[Any], name: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(get_type_hints(cls, include_extras=True)[name])


def _told(cls: type[Any], name: str) -> str:
    """Return a field's type as one would write it, without where each part of it is defined."""
    hint = get_type_hints(cls)[name]
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"(?:\w+\.)+(?=\w)", "", text)
