"""What lines of the user's ask of the number of rows: a trace with free rows keeps one answer.

`int(1.25 * x.shape[0] / 4)` is a number of the trace's own rows, and a branch on `x.shape[0] % 4`
is taken as there; torch notes both as guards, and lets a trace with them pass as free.
This file knows torch's guards and symbols; it runs nothing.

Three steps may have no row over the capacity. Public code that has it: switch transformers,
`capacity = int(self.capacity_factor * len(x) / self.n_experts)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

from bigbrain_fx.frontend.translation.sources import is_users

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_MOST_ROWS = 256  # up to here every number of rows is tried, above it those that divide the batch
Asked = tuple[str, Callable[[int], bool]]


def in_guards(program: ExportedProgram) -> tuple[Asked, ...]:
    """Return what the user's own lines asked: where, and whether it holds for so many rows."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    mode = next((m for v in values if (m := getattr(v, "fake_mode", None)) is not None), None)
    guards = mode.shape_env.guards if mode is not None and mode.shape_env is not None else ()
    places = ((guard.sloc.framework_loc, guard.expr) for guard in guards)
    return tuple(
        (f"{place.filename.rpartition('/')[2]}:{place.lineno}", _held(asked))
        for place, asked in places
        if isinstance(place, FrameSummary) and is_users(place.filename)
    )


def _held(asked: Any) -> Callable[[int], bool]:  # noqa: ANN401  # sympy ships no types
    """Return whether a guard holds; one that is no yes or no was asked of data."""
    return lambda rows: asked.subs(dict.fromkeys(asked.free_symbols, rows)) != False  # noqa: E712


def goes_by_rows(asked: Sequence[Asked], rows: int, refusal: Callable[[int], object]) -> str | None:
    """Say which line does otherwise with fewer rows, as a micro-batch has.

    One row is left out: torch takes its answers for two or more, and it is run and compared.

    Args:
        asked: of a trace with free rows.
        rows: of the batch.
        refusal: the error of the model itself where it does not run on so many, else None.
    """
    for count in _counts(rows) if asked else ():
        line = next((line for line, holds in asked if not holds(count)), None)
        if line is not None and refusal(count) is None:
            return f"{line} goes by how many rows there are, and does otherwise with {count}"
    return None


def _counts(rows: int) -> Iterator[int]:
    all_of_them = rows <= _MOST_ROWS
    yield from (n for n in range(2, rows + 1) if all_of_them or rows % n == 0)
