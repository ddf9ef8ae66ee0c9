"""Names that belong together as one text, and numbers with their nouns."""

from __future__ import annotations

from collections.abc import Sequence


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


def micro_text(count: int) -> str:
    """Say how many micro-batches: `4 micro-batches`."""
    return f"{count} micro-batch{'es' * (count != 1)}"


def shortened(names: Sequence[str], most: int) -> str:
    """List the first few of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
