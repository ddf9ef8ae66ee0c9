"""Figures of a measurement beside the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figures:
    """A title, the figures as text and for JSON, and whether all bounds are kept."""

    title: str
    text: str
    facts: dict[str, Any]
    passed: bool
