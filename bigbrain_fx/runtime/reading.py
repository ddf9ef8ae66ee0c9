"""How a stream runs the user's batches(): under random state of its own, its errors in words."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .own_dice import set_states, states_of
from .stream import BatchError, RandomState

COMES_AGAIN = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


@contextmanager
def in_words(step: int) -> Iterator[None]:
    """Say of an error of the user's code that would come again what it is, and end the run so.

    Raises:
        BatchError: as it does.
    """
    try:
        yield
    except BatchError:
        raise
    except Exception as error:
        if not _comes_again(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        caught = lines[0].startswith("Caught ")  # in a worker process: the error is the last line
        text = lines[-1] if caught else f"{type(error).__name__}: {lines[0]}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames[1:] if "site-packages" not in frame.filename]
        at = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        raise BatchError(
            f"batches(seed) fails at the batch of step {step}: {text}{at}", code="BX5030"
        ) from error


def _comes_again(error: Exception) -> bool:
    """Whether a new process would meet it, too: no fault of a disk, a network or a worker's end."""
    if isinstance(error, OSError):
        return isinstance(error, COMES_AGAIN)
    return not isinstance(error, MemoryError) and "DataLoader worker (pid" not in str(error)


class OwnRandomState(RandomState):
    """The stream's random state, with that of generators that the user's file has for itself."""

    def __init__(self, seed: int, more: Sequence[Any] = ()) -> None:
        super().__init__(seed)
        self.more, self.own_more = more, states_of(more)

    def __enter__(self) -> None:
        super().__enter__()
        self.outer_more = states_of(self.more)
        set_states(self.more, self.own_more)

    def __exit__(self, *_: object) -> None:
        self.own_more = states_of(self.more)
        set_states(self.more, self.outer_more)
        super().__exit__()
