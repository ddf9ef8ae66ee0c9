"""Random ops of torch that draw the same for each shape: a bundle and a plain loop then agree.

A bundle seeds its draws by step, micro-batch and place, as a replacement has to; a loop goes on.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy.random
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LOCK = threading.Lock()  # devices are threads, and torch has one generator


class _Still(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        if torch.Tag.nondeterministic_seeded not in func.tags or _makes_data():
            return func(*args, **(kwargs or {}))
        with _LOCK:
            torch.default_generator.manual_seed(0)  # ops that a trace has in its place, too
            return func(*args, **(kwargs or {}))


def _makes_data() -> bool:
    """Whether a draw is of the file's data or first weights, which both have alike."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_name not in ("batches", "example_batch", "model"):
        frame = frame.f_back
    return frame.f_back is not None


@contextmanager
def still(wanted: bool) -> Iterator[None]:
    """Still the random ops of this thread and of those that it starts, where that is wanted."""
    run = threading.Thread.run

    def stilled(thread: threading.Thread) -> None:
        with _Still():
            run(thread)

    if not wanted:
        yield
        return
    with ExitStack() as stack:
        for module, kind in ((random, random.Random), (numpy.random, numpy.random.RandomState)):
            for name in (n for n in _NAMES if hasattr(module, n)):
                drawn = partial(_drawn, getattr(module, name), kind, name)
                stack.enter_context(mock.patch.object(module, name, drawn))
        stack.enter_context(_Still())
        stack.enter_context(mock.patch.object(threading.Thread, "run", stilled))
        yield


_NAMES = (
    "random",
    "randint",
    "choice",
    "choices",
    "rand",
    "uniform",
    "beta",
    "permutation",
    "shuffle",
)


def _drawn(
    real: Callable[..., object],
    kind: Callable[[int], object],
    name: str,
    *args: object,
    **options: object,
) -> object:
    """Draw with Python or NumPy from a new generator."""
    draw = real if _makes_data() else getattr(kind(0), name)
    return draw(*args, **options)
