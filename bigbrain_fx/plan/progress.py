"""How far planning is, told to whoever listens, and whether it shall stop with what there is.

A search is deep below the one who waits for it, and one of several that make a plan: who presses
Ctrl-C in one of them wants no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Say = Callable[[str], None]  # called often: as cheap as a spinner's new text

_listener: ContextVar[Say | None] = ContextVar("listener", default=None)


@contextmanager
def telling(say: Say) -> Iterator[None]:
    """Have `say` called with how far each plan is that is made meanwhile, in this context."""
    before = _listener.set(say)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(how_far: str) -> None:
    """Tell whoever listens; nobody has to."""
    say = _listener.get()
    if say is not None:
        say(how_far)


_asked: ContextVar[bool | None] = ContextVar("asked", default=None)  # None: nobody would know


@contextmanager
def until_stopped() -> Iterator[None]:
    """Note within whether Ctrl-C was pressed; of several around each other the outermost counts."""
    if _asked.get() is not None:
        yield
        return
    before = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(before)


def stop() -> None:
    """Note that a search was ended by Ctrl-C, with a plan at hand."""
    if _asked.get() is not None:
        _asked.set(True)


def is_stopped() -> bool:
    """Whether no more searches are wanted."""
    return bool(_asked.get())
