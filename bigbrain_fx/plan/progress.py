"""How far planning is, told to whoever listens: a search is deep below the one who waits for it."""

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
