"""The clock, moved on for a while: would forward compute anything else an hour later, or a year?

    run ─▶ time.time(), datetime.now(), ... say 67 s, 10 min, ... 11 years more ─▶ run: alike?

A warm-up by wall time ends between two steps; a trace keeps what it was. Only the thread that asks
sees another time. This file knows Python's clocks and calls what it is given; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bigbrain_fx.frontend.tracing.budget import budget
from bigbrain_fx.frontend.tracing.plain import Numbers, alike
from bigbrain_fx.frontend.tracing.reached import Place, holding
from bigbrain_fx.frontend.tracing.world import CLOCKS

_MOVES_S = (67, 601, 5_407, 43_207, 302_413, 17_000_003, 345_600_001)
_DAY_S = 90_061  # and an hour, a minute and a second
_LOOK_S = 1.0  # for all runs; the first and the last are always made
_DATETIME, _DATE = datetime.datetime, datetime.date
_ASKED_WITHOUT = ("localtime", "gmtime", "ctime")  # of now, unless they are given a time


def decided_by_clock(run: Callable[[], Numbers], roots: Iterable[object]) -> int | None:
    """Return how many seconds later other numbers come; None when none of those tried gives any.

    Args:
        run: gives the same numbers each time, but for the clock.
        roots: model and loss: a clock that they hold under a name of their own is moved on, too.
    """
    held = list(holding(roots, _is_clock))
    first, is_over = run(), budget(_LOOK_S)
    for by_s in _MOVES_S:
        if by_s not in (_MOVES_S[0], _MOVES_S[-1]) and is_over():
            continue
        with moved_on(by_s, held):
            if not alike(first, run()):
                return by_s
    return None


@contextlib.contextmanager
def moved_on(by_s: int, held: Iterable[Place] = ()) -> Iterator[None]:
    """Let every clock of Python be so many seconds later, for this thread."""
    moved: dict[object, object] = {
        own: _only_here(own, _later(name, by_s)) for name, own in CLOCKS.items()
    }
    moved |= _dates(by_s)
    before = [(place, place.get()) for place in held]
    modules = [(time, name, own) for name, own in CLOCKS.items()]
    of_dates = [(datetime, "datetime", _DATETIME), (datetime, "date", _DATE)]
    try:
        for module, name, own in (*modules, *of_dates):
            setattr(module, name, moved[own])
        for place, own in before:
            place.put(moved[own])
        yield
    finally:
        for module, name, own in (*modules, *of_dates):
            setattr(module, name, own)
        for place, own in before:
            place.put(own)


@contextlib.contextmanager
def a_day_later(*roots: object) -> Iterator[None]:
    """Let it be tomorrow for what these reach, and for whoever asks Python's modules."""
    with moved_on(_DAY_S, list(holding(roots, _is_clock))):
        yield


def _is_clock(value: object) -> bool:
    return any(value is own for own in (*CLOCKS.values(), _DATETIME, _DATE))


def _only_here(own: Callable[..., Any], later: Callable[..., Any]) -> Callable[..., Any]:
    here = threading.get_ident()
    return lambda *args: (later if threading.get_ident() == here else own)(*args)


def _later(name: str, by_s: int) -> Callable[..., Any]:
    own = CLOCKS[name]
    if name.endswith("_ns"):
        return lambda *args: own(*args) + by_s * 1_000_000_000
    if name in _ASKED_WITHOUT:
        return lambda *args: own(*args or (CLOCKS["time"]() + by_s,))
    if name == "strftime":
        return lambda text, *at: own(text, *at or (CLOCKS["localtime"](CLOCKS["time"]() + by_s),))
    return lambda *args: own(*args) + by_s


def _dates(by_s: int) -> dict[object, object]:
    gap = datetime.timedelta(seconds=by_s)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:  # noqa: ANN401  # a plain one
            return _DATETIME.now(tz) + gap

        @classmethod
        def utcnow(cls) -> Any:  # noqa: ANN401
            return _DATETIME.now(datetime.UTC).replace(tzinfo=None) + gap

        @classmethod
        def today(cls) -> Any:  # noqa: ANN401
            return _DATETIME.now() + gap

    class LaterDate(datetime.date):
        @classmethod
        def today(cls) -> Any:  # noqa: ANN401
            return (_DATETIME.now() + gap).date()

    return {_DATETIME: Later, _DATE: LaterDate}
