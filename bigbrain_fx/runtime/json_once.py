"""JSON objects that name each entry once."""

from __future__ import annotations

from typing import Any


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of which its reader would let the last of two entries win in silence.

    Raises:
        ValueError: names an entry that is there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found
