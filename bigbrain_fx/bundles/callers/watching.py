"""Sessions that watch their caller's module: their tensors are of classes that no trace takes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol


class Watching(Protocol):
    """Something that watches a module."""

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a block in which the module is plain, with the weights of now."""
        ...


WATCHING: weakref.WeakSet[Watching] = weakref.WeakSet()


@contextmanager
def plain_modules() -> Iterator[None]:
    """Let the modules of all open sessions be plain for a block: a loss may call one in a trace."""
    with ExitStack() as stack:
        for each in list(WATCHING):
            stack.enter_context(each.unwatched())
        yield
