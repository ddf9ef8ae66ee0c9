"""The lines that led to a call: one list of frames for each module call, and what they say.

    gpt.py:93 (GPT.forward) ─▶ gpt.py:62 (Block.forward) ─▶ gpt.py:45 (Attention.forward)

The emitter names values after the variables that these statements assign. This file knows frames
and source files; it knows no ops.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from bigbrain_fx.frontend.translation.sources import is_users

Lines: TypeAlias = tuple[tuple[str, ...], ...]
"""Frames ("gpt.py:93", outermost first), one list for each module call and one before them all."""

_MARK = "calls "
_MODULE = ("torch/nn/modules/module.py", "_call_impl")
_LONGEST = 400  # characters of a statement; what is longer assigns a table, not a value

_text_of: dict[str, str] = {}
"""Place ("gpt.py:93") -> the statement there, of every place handed out."""


class Trail(traceback.StackSummary):
    """The user's innermost frame, and before it one line that lists the frames of all calls."""

    trail = ""

    def format(self, **_: object) -> list[str]:
        """Return the text that torch keeps with a node."""
        return [self.trail, *super().format()]


def trail(stack: Sequence[traceback.FrameSummary]) -> traceback.StackSummary:
    """Keep of a stack what `lines_of` and `sources.line_of` read; nothing without a user's line."""
    calls: list[list[traceback.FrameSummary]] = [[]]
    for frame in stack:
        if frame.name == _MODULE[1] and frame.filename.endswith(_MODULE[0]):
            calls.append([])
        elif is_users(frame.filename):
            calls[-1].append(frame)
    kept = Trail([frame for call in calls for frame in call][-1:])
    listed = ("\t".join(f"{f.filename}:{f.lineno}" for f in _own(call)) for call in calls)
    kept.trail = _MARK + "\t|\t".join(listed) + "\n"
    return kept


def _own(call: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out the decorators around a module's `forward`."""
    names = [frame.name for frame in call]
    return call[names.index("forward") :] if "forward" in names else call


def lines_of(stack_trace: str | None) -> Lines:
    """Read the frames of a node's stack trace; nothing when torch made the node by itself."""
    first = (stack_trace or "").partition("\n")[0]
    if not first.startswith(_MARK.strip()):
        return ()
    calls = first.removeprefix(_MARK.strip()).split("|")
    return tuple(
        tuple(_place(frame) for frame in call.split("\t") if frame.strip()) for call in calls
    )


def statements(places: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the statement at each place that has one, on one line."""
    found = ((place, _text_of.get(place, "")) for place in dict.fromkeys(places))
    return tuple((place, text) for place, text in found if text)


@lru_cache(maxsize=65536)
def _place(frame: str) -> str:
    """Return where the statement starts that a frame is in."""
    file, _, line = frame.strip().rpartition(":")
    start, text = _statement(file, int(line))
    place = f"{Path(file).name}:{start}"
    _text_of.setdefault(place, text)
    return place


def _statement(file: str, line: int) -> tuple[int, str]:
    """Return where the simple statement at a line of a file starts, and its text; "" for none."""
    for node in reversed(_statements(file).get(line, [])):
        text = ast.unparse(node)  # of the few that are asked for: a whole file takes long
        if len(text) <= _LONGEST:
            return node.lineno, text
    return line, ""


@lru_cache(maxsize=256)
def _statements(file: str) -> dict[int, list[ast.stmt]]:
    """Return the simple statements at each line of a file, outer ones first.

    A file that does not parse has none.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[ast.stmt]] = {}
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
    for node in (node for node in ast.walk(tree) if isinstance(node, kinds)):
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            found.setdefault(line, []).append(node)
    return found
