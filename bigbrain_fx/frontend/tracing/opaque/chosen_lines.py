"""Choice of a forward's opaque statements: by a refusal, or by their state.

    a refusal of a line     ─▶ its statement ─▶ refused for what they are given: more before them
                                                for what they give: more behind them
    attributes assigned     ─▶ all statements that assign or read them

This file knows refusals and texts; it knows no traces.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from torch import nn

from bigbrain_fx.frontend.tracing.opaque.forward_text import Forward, Span, is_lines, span_of
from bigbrain_fx.frontend.tracing.opaque.syntax import escapes
from bigbrain_fx.frontend.translation.sources import is_users, with_causes

OF_GIVEN = ("BX0141a", "BX0141e", "BX0140j")
"""Refusals of a module for what it is given, or writes into: what makes that is to be in it."""


def span_around(model: nn.Module, error: BaseException, wholes: Sequence[str]) -> Span | None:
    """Return the statements of a forward that an error names, with the opaque ones so far.

    Args:
        model: the user's.
        error: why no trace holds the model, or why the opaque statements do not suffice.
        wholes: paths of the opaque statements.

    Returns:
        None where the error names no line of a forward of the user's.
    """
    before = [span for span in (span_of(model, path) for path in wholes) if span]
    found = _at_frames(model, error) or _at_line(model, error) or (None, *before)[-1]
    if found is None:
        return None
    span, needed = found.whole(), {*found.numbers}
    for other in before:
        near = other.forward.path == span.forward.path
        if near and span.first <= other.last + 1 and other.first <= span.last + 1:
            span = _joined(span, other, before_it=getattr(error, "code", "") in OF_GIVEN)
            needed |= {*other.numbers}
    span = span.needing({*needed, *span.sharing()})
    return None if span in before else span


def _joined(span: Span, other: Span, *, before_it: bool) -> Span:
    """Return both spans; for equal ones, a larger span, before their inputs or after."""
    if other.contains(span):
        ends = other.last == len(other.forward.body)
        goes_back = other.first > 1 and (before_it or ends)
        more = _earlier(other.forward, other.first - 1) if goes_back else other.last + 1
        return other.with_statement(more).whole() if more <= len(other.forward.body) else other
    return span.with_statement(other.first).with_statement(other.last).whole()


def _earlier(forward: Forward, number: int) -> int:
    """Return the nearest statement before that may be in lines: none that hands on the module."""
    while number > 1 and escapes([forward.body[number - 1]], forward.own):
        number -= 1
    return number


def state_lines(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the statements that assign to attributes of their module."""
    found = list[str]()
    for forward in _forwards(model):
        stores = forward.stores()
        if stores:
            span = _with_result(Span(forward, stores[0], stores[-1]).whole())
            span = span.needing(span.sharing())
            found += [] if span.is_all else [span.path]
    return tuple(found)


def last_lines(model: nn.Module, path: str) -> list[str]:
    """Return the path of the statements of a module's forward behind its last call of a module."""
    forward = Forward.of(model, path)
    calls, last = (forward.calls(), len(forward.body)) if forward else ([], 0)
    if forward is None or not calls or calls[-1] == last:
        return []
    return [Span(forward, calls[-1] + 1, last).path]


def lines_between_calls(model: nn.Module, path: str) -> list[str]:
    """Return the paths of all statements of a module's forward that do not call one module."""
    forward, found = Forward.of(model, path), list[Span]()
    calls = forward.calls() if forward else []
    if forward is None or not calls:
        return []
    for number in (n for n in range(1, len(forward.body) + 1) if n not in calls):
        own = Span(forward, number, number)
        before = found[-1] if found else None
        if before and (before.last == number - 1 or not (before.left or before.returns)):
            own = found.pop().with_statement(number)
            own = own.needing([n for n in range(own.first, number) if n not in calls])
        found.append(own)
    return [span.path for span in found if span.left or span.returns]


def _with_result(span: Span) -> Span:
    """Return the same with statements before, until something of them is read later."""
    while not span.left and not span.returns and span.first > 1:
        span = span.with_statement(span.first - 1).whole()
    return span


def _at_frames(model: nn.Module, error: BaseException) -> Span | None:
    """Return the statement of the innermost forward that an error passed through."""
    forwards = _forwards(model)
    for cause in reversed(list(with_causes(error))):
        for file, line, column in reversed([*_places(cause.__traceback__)]):
            span = _span(forwards, file, line, column)
            if span is not None:
                return span
    return None


def _places(trace: types.TracebackType | None) -> Iterator[tuple[str, int, int | None]]:
    """Yield file, line and column of each frame that an error passed through."""
    while trace is not None:
        code = trace.tb_frame.f_code
        *_, column, _ = next(islice(code.co_positions(), trace.tb_lasti // 2, None))
        yield code.co_filename, trace.tb_lineno, column
        trace = trace.tb_next


def _at_line(model: nn.Module, error: BaseException) -> Span | None:
    """Return the statement of the line that a refusal names."""
    file, _, line = str(getattr(error, "at", None) or "").rpartition(":")
    if not line.isdigit():
        return None
    return _span(_forwards(model), file, int(line))


def _span(
    forwards: Sequence[Forward], file: str, line: int, column: int | None = None
) -> Span | None:
    for forward in forwards:
        if forward.file == file or Path(forward.file).name == file:
            number = forward.statement_at(line, column)
            if number is not None:
                return _with_result(Span(forward, number, number).whole())
    return None


def _forwards(model: nn.Module) -> list[Forward]:
    """Return the forwards of the user's own classes, of each class that has one module alone."""
    kinds = [type(module) for module in model.modules()]
    paths = [path for path, module in model.named_modules() if kinds.count(type(module)) == 1]
    found = (Forward.of(model, path) for path in paths if not is_lines(path))
    return [forward for forward in found if forward and is_users(forward.file)]
