"""Names that belong together as one text, and numbers with their nouns."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


def micro_text(count: int) -> str:
    """Say how many micro-batches: `4 micro-batches`."""
    return f"{count} micro-batch{'es' * (count != 1)}"
