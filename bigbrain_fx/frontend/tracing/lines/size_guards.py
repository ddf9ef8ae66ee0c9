"""Guards: conditions on rows and lengths in the user's lines, of which a trace has one outcome.

`int(1.25 * x.shape[0] / 4)` is a constant of the trace's rows, and a branch on `x.shape[0] % 4` is
taken as in the trace. PyTorch records both as guards, and accepts a trace with them as free. This
file knows torch's guards and symbols; it runs nothing.

Three steps may have no row over the capacity. Public code that has it: switch transformers,
`capacity = int(self.capacity_factor * len(x) / self.n_experts)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

from bigbrain_fx.core import longest
from bigbrain_fx.frontend.translation.sizes import env_of
from bigbrain_fx.frontend.translation.sources import is_users

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_MOST_ROWS = 256  # up to here every number of rows is tried, above it those that divide the batch
Asked = tuple[str, Callable[[int], bool]]
AskedOfLengths = tuple[str, Callable[[Mapping[str, int]], bool]]


def in_guards(program: ExportedProgram, lengths: Mapping[Any, str]) -> tuple[Asked, ...]:
    """Return the guards of the user's own lines: place, and whether each holds for so many rows.

    Args:
        program: as exported.
        lengths: the symbols of free lengths, taken as the longest, and their names.
    """
    most = {symbol: longest(name) for symbol, name in lengths.items()}
    return tuple((line, _held(asked.xreplace(most))) for line, asked in _guards(program))


def of_lengths(
    program: ExportedProgram, lengths: Mapping[Any, str], rows: int
) -> tuple[AskedOfLengths, ...]:
    """Return the guards of the user's own lines on free lengths, for a batch of so many rows.

    Args:
        program: as exported.
        lengths: the symbols of free lengths, and their names.
        rows: of the batch.
    """
    return tuple(
        (line, _held_of(asked, lengths, rows))
        for line, asked in _guards(program)
        if not asked.free_symbols.isdisjoint(lengths)
    )


def _held_of(
    asked: Any,  # noqa: ANN401  # sympy ships no types
    lengths: Mapping[Any, str],
    rows: int,
) -> Callable[[Mapping[str, int]], bool]:
    def holds(sizes: Mapping[str, int]) -> bool:
        known = {s: sizes[lengths[s]] if s in lengths else rows for s in asked.free_symbols}
        return bool(asked.subs(known) != False)  # noqa: E712

    return holds


def _guards(program: ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Yield each line of the user's that has a guard on a size, and the guard."""
    env = env_of(program)
    for guard in () if env is None else env.guards:
        place = guard.sloc.framework_loc
        if isinstance(place, FrameSummary) and is_users(place.filename):
            yield f"{place.filename.rpartition('/')[2]}:{place.lineno}", guard.expr


def goes_by_length(asked: Sequence[AskedOfLengths], lengths: Iterable[str]) -> str | None:
    """Name the line that takes another way in a shorter batch.

    A length of one is left out: no run has it.

    Args:
        asked: guards of a trace with free lengths.
        lengths: their names.
    """
    names = sorted(set(lengths))
    for count in range(2, max(map(longest, names), default=0)) if asked else ():
        sizes = {name: min(count, longest(name)) for name in names}
        line = next((line for line, holds in asked if not holds(sizes)), None)
        if line is not None:
            return f"{line} goes by the length of a batch, and does otherwise with {count}"
    return None


def _held(asked: Any) -> Callable[[int], bool]:  # noqa: ANN401  # sympy ships no types
    """Return a test of a guard for a number of rows; a guard on data passes."""
    return lambda rows: asked.subs(dict.fromkeys(asked.free_symbols, rows)) != False  # noqa: E712


def goes_by_rows(asked: Sequence[Asked], rows: int, refusal: Callable[[int], object]) -> str | None:
    """Name the line that takes another way with fewer rows, as a micro-batch has.

    One row is left out: torch takes its answers for two or more, and it is run and compared.

    Args:
        asked: guards of a trace with free rows.
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
