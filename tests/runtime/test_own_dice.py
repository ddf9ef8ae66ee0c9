"""Generators that a file has made: found, left alone, a state for each stream of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.own_dice import left_alone, own_dice

GEN = torch.Generator().manual_seed(1)
COIN = random.Random(2)
SHUFFLE = random.shuffle  # a method of the generator that all share
LOADER = DataLoader(
    TensorDataset(torch.arange(12.0)),
    batch_size=4,
    shuffle=True,
    generator=torch.Generator().manual_seed(3),
)


class Data:
    """Holds dice of NumPy."""

    def __init__(self) -> None:
        self.dice = np.random.default_rng(4), np.random.RandomState(5)

    def draw(self) -> float:
        return float(self.dice[0].normal() + self.dice[1].rand() + COIN.random())


DATA = Data()


def drawn(_seed: int) -> Iterator[dict[str, Tensor]]:
    while True:
        yield {"x": torch.rand(4, generator=GEN) + DATA.draw()}


def loaded(_seed: int) -> Iterator[dict[str, Tensor]]:
    while True:
        for (rows,) in LOADER:
            yield {"x": rows}


def streams(batches: object, count: int = 2) -> list[Stream]:
    where = torch.device("cpu")
    return [Stream(batches, 0, {"x": ("x",)}, (), 1, where) for _ in range(count)]  # type: ignore[arg-type]


def test_generators_of_a_file_are_found_without_shared_ones() -> None:
    found = own_dice(drawn)
    assert {id(GEN), id(COIN), id(LOADER.generator)} <= {id(each) for each in found}
    assert all(any(each is dice for each in found) for dice in DATA.dice)
    assert own_dice(SHUFFLE) == []
    assert own_dice(partial(sorted, COIN)) == [COIN]


@pytest.mark.gate("loaded")
@pytest.mark.parametrize("batches", [drawn, loaded])
def test_streams_of_one_process_draw_the_same_in_any_order(batches: object) -> None:
    one, two = streams(batches)
    steps = [(one, 0), (one, 1), (two, 0), (one, 2), (two, 1), (two, 2), (one, 4), (two, 4)]
    seen: dict[int, list[Tensor]] = {}
    for stream, step in steps:
        stream.advance(step)
        seen.setdefault(step, []).append(stream.get("x", 0))
    assert all(torch.equal(*pair) for pair in seen.values())
    one.rewind(1)
    one.advance(1)
    assert torch.equal(one.get("x", 0), seen[1][0])


def test_draws_for_another_purpose_move_no_generator() -> None:
    (stream,) = streams(drawn, 1)
    with left_alone(drawn):
        first = next(drawn(0))["x"]
    stream.advance(0)
    assert torch.equal(stream.get("x", 0), first)
