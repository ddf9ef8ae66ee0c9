"""Sums over micro-batches and replicas: grouping, memory, and replicas that go on alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from bigbrain_fx.runtime.device import Device
from bigbrain_fx.runtime.gradients import StepSums
from bigbrain_fx.runtime.modules import HeldWeights
from bigbrain_fx.runtime.replicas import Sum, sizes
from bigbrain_fx.runtime.standing import TakingOver, merged, shared_out


def leaves(count: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(count)
    return [torch.randn(64, generator=dice) for _ in range(count)]


def by_definition(found: list[Tensor]) -> Tensor:
    """Add as the binary tree says: the largest power of two from the left, halves alike."""

    def node(parts: list[Tensor]) -> Tensor:
        half = len(parts) // 2
        return parts[0] if len(parts) == 1 else node(parts[:half]) + node(parts[half:])

    total, rest = None, found
    while rest:
        size = 1 << (len(rest).bit_length() - 1)
        part = node(rest[:size])
        total, rest = part if total is None else total + part, rest[size:]
    assert total is not None
    return total


def summed(order: str, replicas: list[list[int]], found: list[Tensor]) -> Tensor:
    """Add as replicas do: each its own parts, then the parts of all, ascending."""
    parts = []
    for own in replicas:
        here = Sum(order == "tree")
        if order == "micro":
            parts += [(micro, 1, found[micro].clone()) for micro in own]
            continue
        for micro in own:
            here.add(micro, 1, found[micro].clone())
        assert [(first, size) for first, size, _ in here.parts] == sizes(order, own) or (
            order == "replica"
        )
        parts += here.parts if order == "tree" else [(own[0], len(own), here.total())]
    total = Sum(order == "tree")
    for part in sorted(parts, key=lambda part: part[0]):
        total.add(*part)
    return total.total()


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_tree_has_the_same_bits_for_any_replicas(
    count: int, replicas: int, dice: random.Random
) -> None:
    found = leaves(count)
    whose = [dice.randrange(replicas) for _ in range(count)]
    groups = [[m for m in range(count) if whose[m] == r] for r in range(replicas)]
    assert torch.equal(summed("tree", [g for g in groups if g], found), by_definition(found))


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 5))
def test_by_number_has_the_bits_of_one_process(count: int, replicas: int) -> None:
    found = leaves(count)
    groups = [list(range(r, count, replicas)) for r in range(replicas)]
    want = found[0]
    for leaf in found[1:]:
        want = want + leaf
    assert torch.equal(summed("micro", [g for g in groups if g], found), want)


def test_the_orders_differ() -> None:
    """Else the tests above would pass with any order."""
    found = leaves(8)
    made = [summed(order, [[0, 1, 2, 3], [4, 5, 6, 7]], found) for order in ("replica", "micro")]
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(by_definition(found), made[1])


# --------------------------------------------------------------------------- memory of gradients


def held(**parameters: Any) -> HeldWeights:
    found = HeldWeights("d0", {}, {})
    found.parameters, found.of_stage = dict(parameters), {0: [*parameters]}
    return found


def test_sums_leave_what_somebody_has_kept() -> None:
    """As a hook of the user's does that looks at gradients after the step."""
    kept = [torch.randn(4, 3) for _ in range(3)]
    before = [gradient.clone() for gradient in kept]
    sums = StepSums(held(weight=nn.Parameter(torch.ones(4, 3))))
    for gradient in kept:
        sums.add("weight", 0, gradient)
    assert all(map(torch.equal, kept, before))
    assert torch.equal(sums.gradients["weight", 0], before[0] + before[1] + before[2])


def test_a_gradient_of_two_parameters_becomes_one_of_each() -> None:
    """Of one micro-batch nothing is added up; an optimizer may write into what it is given."""
    a, b = (nn.Parameter(torch.ones(2, 4)) for _ in "ab")
    sums = StepSums(held(a=a, b=b))
    made = torch.autograd.grad((torch.randn(2, 4) * (a + b)).sum(), [a, b])
    for name, gradient in zip("ab", made, strict=True):
        sums.add(name, 0, gradient)
    found = sums.summed()
    assert torch.equal(found["a"], found["b"])
    found["a"].zero_()
    assert found["b"].count_nonzero() == found["b"].numel()


@pytest.mark.parametrize("micros", [1, 3])
def test_gradients_lie_as_those_of_backward_do(micros: int) -> None:
    """A norm adds in the order of memory: of a transposed gradient it would have other bits."""
    stacked = nn.Parameter(torch.randn(3, 8, 8))
    repeated, turned = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 8).t())
    named = {"stacked": stacked, "repeated": repeated, "turned": turned}
    sums = StepSums(held(**named))
    for _ in range(micros):
        y = torch.einsum("bd,ekd->bk", torch.randn(4, 8), stacked) @ turned + repeated.sum()
        made = torch.autograd.grad(y.square().sum(), [*named.values()], retain_graph=True)
        y.square().sum().backward()
        for name, gradient in zip(named, made, strict=True):
            sums.add(name, 0, gradient)
    found = sums.summed()
    for name, parameter in named.items():
        grad: Tensor | None = parameter.grad
        assert grad is not None
        assert torch.equal(found[name], grad), name
        assert found[name].stride() == grad.stride(), name


# ------------------------------------------------------------ replicas that go on without others


@pytest.mark.parametrize(
    ("before", "lost", "after"),
    [
        (((0, 2), (1, 3)), {1}, ((0, 1, 2, 3), ())),
        (((0, 3, 6), (1, 4, 7), (2, 5)), {0}, ((), (0, 1, 4, 6, 7), (2, 3, 5))),
        ((range(6), (6,), (7,)), {1}, (range(7), (), (7,))),
        (((0, 1), (2,), (3,)), {0, 1}, ((), (), range(4))),
    ],
)
def test_micro_batches_go_to_who_then_has_the_fewest_for_its_share(
    before: Sequence[Sequence[int]], lost: set[int], after: Sequence[Sequence[int]]
) -> None:
    assert shared_out(before, lost) == tuple(map(tuple, after))


@pytest.mark.parametrize(
    ("lost", "found"),
    [({0}, (0, 7, 9)), ({1}, (7, 0, 9)), ({2}, (3, 13, 0)), ({0, 1}, (0, 0, 16))],
)
def test_no_number_moves_within_a_bucket(lost: set[int], found: tuple[int, ...]) -> None:
    pieces = (3, 4, 9)
    assert merged(pieces, lost) == found
    edges = {sum(pieces[:place]) for place in range(4)}
    assert {sum(found[:place]) for place in range(4)} <= edges


class Emitted(Device):
    """Has two micro-batches in flight, as 1f1b of the first of two stages."""

    micros: tuple[Sequence[int], ...] = ((0, 2), (1, 3))
    done: list[str]

    def step_once(self) -> None:
        own = self.micros[self.replica]
        for i in range(2):
            self.forward_0(own[i])
        for i in range(2):
            self.backward_0(own[i])
        self.update()

    def forward_0(self, m: int) -> None:
        self.done.append(f"f{m}")

    def backward_0(self, m: int) -> None:
        self.done.append(f"b{m}")

    def update(self) -> None:
        raise AssertionError("the emitted update knows channels of the lost")


class Taking(TakingOver, Emitted):
    """Writes down what it does."""

    micros = ((0, 1, 3), ())
    emitted = Emitted

    def __init__(self) -> None:
        self.done = []

    def sum_gradients(self) -> None:
        self.done.append("sum")

    def exchange_statistics(self) -> None:
        self.done.append("statistics")

    def optimizer_step(self) -> None:
        self.done.append("update")


def test_the_schedule_is_gone_through_again_and_one_update_is_made() -> None:
    device = Taking()
    device.step_once()
    assert device.done == ["f0", "f1", "b0", "b1", "f3", "b3", "sum", "statistics", "update"]
