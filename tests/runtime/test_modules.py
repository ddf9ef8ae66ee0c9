"""Named tensors, and random numbers that do not depend on where an op runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.modules import (
    Region,
    Stage,
    Tensors,
    active,
    buffer,
    parameter,
)
from bigbrain_fx.runtime.own_dice import left_alone, own_dice


@contextlib.contextmanager
def key(seed: int = 0, step: int = 0, micro: int = 0) -> Iterator[None]:
    """Run as the runtime runs a stage: under a key."""
    active.key = seed, step, micro
    try:
        yield
    finally:
        active.key = None


class Block(Region):
    def forward(self, x: Tensor) -> Tensor:
        with self.seeded("drop", 0, 2):
            x = F.dropout(x, 0.5)
        with self.seeded("drop", 1, 2):
            return F.dropout(x, 0.5)


def block(stage: Stage, number: int) -> Block:
    holder = stage.get_submodule("blocks")
    assert isinstance(holder, Tensors)
    found = holder[number]
    assert isinstance(found, Block)
    return found


class Whole(Stage):
    """Both blocks on one device; the second block is called twice."""

    def __init__(self) -> None:
        super().__init__(blocks=Tensors({0: Block(), 1: Block()}))

    def forward(self, x: Tensor) -> Tensor:
        x = block(self, 0)(x)
        x = block(self, 1).nth(0)(x)
        return block(self, 1).nth(1)(x)


class Half(Stage):
    """The second block alone, on another device."""

    def __init__(self) -> None:
        super().__init__(blocks=Tensors({1: Block()}))

    def forward(self, x: Tensor) -> Tensor:
        x = block(self, 1).nth(0)(x)
        return block(self, 1).nth(1)(x)


ONES = torch.ones(64)


def test_a_mask_is_the_same_wherever_the_op_runs() -> None:
    whole, half = Whole().place(), Half().place()
    with key():
        first = block(whole, 0)(ONES)
        expected = whole(ONES)
        torch.rand(5)  # another device has drawn other numbers before
        assert torch.equal(half(first), expected)


def test_masks_differ_by_seed_step_micro_batch_block_call_and_draw() -> None:
    whole = Whole().place()
    first, second = block(whole, 0), block(whole, 1)
    masks = []
    for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        with key(*place):
            masks += [first(ONES), second.nth(0)(ONES), second.nth(1)(ONES)]
    with key(), first.seeded("drop", 1, 2):
        masks.append(F.dropout(ONES, 0.5))
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)


def test_an_ordinal_counts_calls_and_draws() -> None:
    """The third draw of a module is one place, whether by its second call or by a plain index."""
    stage = Whole().place()
    with key():
        with block(stage, 1).nth(1).seeded("drop", 0, 2):
            one = torch.rand(4)
        with stage.seeded("blocks.1.drop", 2):
            other = torch.rand(4)
    assert torch.equal(one, other)


def test_with_no_key_the_default_generator_goes_on() -> None:
    stage = Half().place()
    torch.manual_seed(5)
    found = stage(ONES)
    torch.manual_seed(5)
    expected = ONES
    for _ in range(4):
        expected = F.dropout(expected, 0.5)
    assert torch.equal(found, expected)


def test_tensors_have_the_names_of_the_model() -> None:
    made = Tensors(
        {"class": (2,), 0: Tensors(weight=(3, 2), bias=buffer(3))},
        steps=buffer(1, dtype=torch.int64),
        frozen=parameter(2, dtype=torch.bfloat16, requires_grad=False),
    )
    named = {name: (tuple(t.shape), t.dtype) for name, t in made.state_dict().items()}
    assert named == {
        "class": ((2,), torch.float32),
        "frozen": ((2,), torch.bfloat16),
        "steps": ((1,), torch.int64),
        "0.weight": ((3, 2), torch.float32),
        "0.bias": ((3,), torch.float32),
    }
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    assert trained == ["class", "0.weight"]
    assert made[0] is made["0"] is made.get_submodule("0")


def test_tied_names_are_one_parameter() -> None:
    made = Tensors(embed=Tensors(weight=(4, 2)), head=Tensors(weight=(4, 2)))
    made.tie("head.weight", "embed.weight")
    assert made.get_parameter("head.weight") is made.get_parameter("embed.weight")
    assert [name for name, _ in made.named_parameters()] == ["embed.weight"]
    assert sorted(made.state_dict()) == ["embed.weight", "head.weight"]


def test_a_region_knows_where_it_lives() -> None:
    assert Region(weight=(1,)).device.type == "cpu"
    assert Region(weight=(1,)).to("meta").device.type == "meta"
    assert Region().device == active.device


@pytest.fixture(autouse=True)
def _no_key_is_left() -> Iterator[None]:
    yield
    assert active.key is None


# --------------------------------------------------------------------------- generators of the file


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
