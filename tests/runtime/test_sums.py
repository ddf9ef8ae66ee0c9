"""Sums over micro-batches and replicas: the grouping is the plan's, whatever arrives when."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bigbrain_fx.runtime.replicas import Sum, sizes


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
