"""The seed of one draw, by its key and place: written once more, by no line of the runtime."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

Key = tuple[int, int, int]  # seed, step, micro-batch
States = tuple[Any, ...]  # of torch's generator, Python's and NumPy's
LOOP = "loop"  # the place of all draws of a micro-batch in the user's own loop


def seed_of(key: Key, place: str) -> int:
    """Return what a generator is seeded with for draws of a key at a place."""
    text = "/".join(map(str, (*key, place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2


def reseed(key: Key, place: str) -> None:
    """Seed this process's generators for one draw: torch's, Python's and NumPy's."""
    number = seed_of(key, place)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(number % 2**32)


def states() -> States:
    """Return where these generators are."""
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    return torch.default_generator.get_state(), random.getstate(), numpy_state


def set_states(found: States) -> None:
    """Let these generators go on from there."""
    torch.default_generator.set_state(found[0])
    random.setstate(found[1])
    if found[2] is not None:
        sys.modules["numpy.random"].set_state(found[2])
