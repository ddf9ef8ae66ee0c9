"""The seed of one draw, by its key and place: written once more, by no line of the runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.frontend import draw_places, place_name

Key = tuple[int, int, int]  # seed, step, micro-batch
Keyed = Callable[[Op], AbstractContextManager[None]]


def seed_of(key: Key, place: str) -> int:
    """Return what a generator is seeded with for draws of a key at a place."""
    text = "/".join(map(str, (*key, place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2


def reseed(key: Key, place: str) -> None:
    """Seed this process's generator for one draw."""
    torch.default_generator.manual_seed(seed_of(key, place))


def keyed(graph: Graph, key: Key) -> Keyed:
    """Return what seeds each op of a graph that draws, by its place in the model."""
    places = draw_places(graph)

    @contextmanager
    def seeded(op: Op) -> Iterator[None]:
        reseed(key, place_name(*places[op.name]))
        yield

    return seeded
