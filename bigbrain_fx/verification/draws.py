"""The seed of one draw, by its key and place: written once more, by no line of the runtime."""

from __future__ import annotations

import hashlib

import torch

Key = tuple[int, int, int]  # seed, step, micro-batch
LOOP = "loop"  # the place of all draws of a micro-batch in the user's own loop


def seed_of(key: Key, place: str) -> int:
    """Return what a generator is seeded with for draws of a key at a place."""
    text = "/".join(map(str, (*key, place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2


def reseed(key: Key, place: str) -> None:
    """Seed this process's generator for one draw."""
    torch.default_generator.manual_seed(seed_of(key, place))
