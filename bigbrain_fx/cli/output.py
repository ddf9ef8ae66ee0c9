"""JSON lines, warnings, and the choice between JSON and text. Knows click; prints no table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import click


def json_line(value: object) -> str:
    """Write a value as one line of JSON; numbers that JSON cannot write become null."""
    return json.dumps(_plain(value), allow_nan=False)


def emit(as_json: bool, facts: object, text: str) -> None:
    """Print one result: its facts as a line of JSON, or its text."""
    click.echo(json_line(facts) if as_json else text)


def warn(notes: Iterable[object]) -> None:
    """Print each note as a warning on stderr."""
    for note in notes:
        click.echo(f"warning: {note}", err=True)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
