"""Doors of rooms: the names that an `__init__` promises, loaded when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def door(room: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a room that loads each promised name when it is first used.

    Args:
        room: the package, `__name__` of its `__init__`.
        homes: file or package inside the room -> the names it has, separated by spaces.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{room}.{home_of[name]}"), name)

    return load
