"""Random numbers of Python and NumPy in forward: detection, place and restoration.

A draw of such a generator is a constant of a trace. This file knows nothing of torch. Public code
that has it: layer dropout by `np.random.uniform(0, 1)`, in older models of transformers.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from bigbrain_fx.frontend.translation.sources import is_users

_Follow: TypeAlias = Callable[[FrameType, str, Any], Any]


_States: TypeAlias = dict[str, object]


def _states() -> _States:
    numpy_random = sys.modules.get("numpy.random")
    states: _States = {"random": random.getstate()}
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    return states


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the state of Python's and NumPy's global generators back at the end."""
    numpy_random = sys.modules.get("numpy.random")
    state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy_random and numpy_state is not None:
            numpy_random.set_state(numpy_state)


@contextlib.contextmanager
def rolls() -> Iterator[list[bool]]:
    """Yield a list that is not empty afterwards when a global generator was used."""
    found: list[bool] = []
    before = _states()
    yield found
    after = _states()  # NumPy may have been imported meanwhile
    found.extend(True for name in sorted(before) if before[name] != after[name])


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Suspend the tracing of lines."""
    follow = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(follow)


@dataclass(frozen=True)
class Place:
    """A line of the user's.

    Attributes:
        at: the line, "model.py:88".
        of_forward: the line of a module's forward that it is, or that has called it.
        inside: class of that module, or "".
    """

    at: str
    of_forward: str
    inside: str


def where_rolled(run: Callable[[], object]) -> Place | None:
    """Run forward once more and return the first line that uses such a generator."""
    return where_changed(run, _states)


def where_changed(run: Callable[[], object], look: Callable[[], object]) -> Place | None:
    """Run forward once more and return the first line after which a look shows something else."""
    watch = _Watch(look)
    with random_state_kept(), contextlib.suppress(Exception):
        previous = sys.gettrace()
        sys.settrace(watch.enter)
        try:
            run()
        finally:
            sys.settrace(previous)
    return watch.found


def _place_of(frame: FrameType, number: int) -> Place:
    """Return the place of a line that runs in a frame, and the forward that it is for."""
    at, outer = _said(frame, number), frame
    while outer.f_code.co_name != "forward" or not outer.f_code.co_argcount:
        if outer.f_back is None:
            return Place(at, at, "")
        outer = outer.f_back
    own = outer.f_locals.get(outer.f_code.co_varnames[0])
    of_forward = at if outer is frame else _said(outer, outer.f_lineno)
    return Place(at, of_forward, type(own).__name__)


def _said(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number}"


class _Watch:
    """Follows the user's lines until one changes the looked-at state, such as a generator's.

    NumPy's own functions are compiled in a way that a profiler does not see.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self.found: Place | None = None
        self._look = look
        self._before = look()
        self._last: dict[FrameType, int] = {}

    def enter(self, frame: FrameType, _event: str, _arg: object, /) -> _Follow | None:
        """Follow a call of the user's; torch's own are left alone."""
        if self.found is not None or not is_users(frame.f_code.co_filename):
            return None
        return self.line

    def line(self, frame: FrameType, event: str, _arg: object, /) -> _Follow | None:
        """Compare the state before a line is run, and when a function ends."""
        if self.found is None and self._look() != self._before:
            number = self._last.get(frame, frame.f_lineno)
            self.found = _place_of(frame, number)
        if event == "return":
            self._last.pop(frame, None)
        else:
            self._last[frame] = frame.f_lineno
        return None if self.found else self.line
