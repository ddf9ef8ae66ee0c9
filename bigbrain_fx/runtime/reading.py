"""How a stream runs the user's batches(): under random state of its own, its errors in words."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .entries import BatchError
from .own_dice import set_states, states_of

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


class RandomState:
    """The stream's random state: torch's, Python's and NumPy's own generators have it inside."""

    def __init__(self, seed: int, more: Sequence[Any] = ()) -> None:
        numpy_random = sys.modules.get("numpy.random")  # nothing here needs it: a user may
        own = numpy_random.RandomState(seed % 2**32).get_state() if numpy_random else None
        torch_state = torch.Generator().manual_seed(seed).get_state()
        self.own = torch_state, random.Random(seed).getstate(), own
        self.more, self.own_more = more, states_of(more)

    def __enter__(self) -> None:
        self.outer, self.outer_more = _dice(), states_of(self.more)
        _set_dice(self.own)
        set_states(self.more, self.own_more)

    def __exit__(self, *_: object) -> None:
        self.own, self.own_more = _dice(), states_of(self.more)
        _set_dice(self.outer)
        set_states(self.more, self.outer_more)


def _dice() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    return torch.get_rng_state(), random.getstate(), numpy_state


def _set_dice(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy.random"].set_state(state[2])
