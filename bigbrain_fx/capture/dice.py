"""Random numbers of Python and NumPy in forward: noticed, found and put back.

A trace keeps what such a generator drew once. This file knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from bigbrain_fx.capture.sources import is_users


def _states() -> dict[str, str]:
    numpy_random = sys.modules.get("numpy.random")
    states = {"random": repr(random.getstate())}
    return states | ({"numpy": repr(numpy_random.get_state())} if numpy_random else {})


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


def where_rolled(run: Callable[[], None]) -> str | None:
    """Run forward once more and return the first line that uses such a generator: "model.py:88"."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event == "c_call" and not found and _is_generator(getattr(arg, "__self__", None)):
            found.append(_user_line(frame))

    with random_state_kept(), contextlib.suppress(Exception):
        previous = sys.getprofile()
        sys.setprofile(watch)
        try:
            run()
        finally:
            sys.setprofile(previous)
    return found[0] if found else None


def _is_generator(owner: object) -> bool:
    name = f"{type(owner).__module__}.{type(owner).__name__}"
    return isinstance(owner, random.Random) or name.startswith("numpy.random.")


def _user_line(frame: FrameType | None) -> str:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "forward"
