"""Micro-batches -> which replica computes which: how many by speed or as asked, then the numbers.

    shares 3:1 of 8     neighbours   0 1 2 3 4 5 | 6 7     few parts of a tree
                        in turn      0 1 2 4 5 6 | 3 7     nobody waits long for the next number

This file knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.errors import InputError


def asked(count: int, shares: Sequence[int], batch: int) -> tuple[int, ...]:
    """Return how many of `count` micro-batches each replica has, in exactly these shares.

    Args:
        count: of a step.
        shares: of each replica.
        batch: rows of a step, which the number of micro-batches divides.

    Raises:
        InputError: they do not divide so.
    """
    whole = sum(shares)
    if count % whole:
        listed = ":".join(map(str, shares))
        raise InputError(
            f"{count} micro-batches cannot be shared {listed}: {whole} does not divide {count}",
            code="BX1290",
            at="--replica-ratio",
            help=_instead(count, shares, batch),
        )
    return tuple(share * count // whole for share in shares)


def _instead(count: int, shares: Sequence[int], batch: int) -> str:
    """Return what can be shared so: the nearest number of micro-batches, else other shares."""
    whole, replicas = sum(shares), len(shares)
    numbers = [n for n in range(whole, batch + 1, whole) if batch % n == 0]
    if numbers:
        return f"--micro-batches {min(numbers, key=lambda n: abs(n - count))}"
    return (
        f"no number of micro-batches that divides the batch of {batch} is divided by {whole}: use "
        f"shares whose sum divides {batch}, or another batch"
        + (f"; or --replicas {replicas} alone, which shares any" if len(set(shares)) == 1 else "")
    )


def by_speed(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many micro-batches each replica has so that the last is done soonest.

    Each has one at least; the next goes to who would be done with it first.

    Source: D'Hondt's method, which minimises the largest count over speed.
    """
    found = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        first = min(range(len(speeds)), key=lambda i: (found[i] + 1) / speeds[i])
        found[first] += 1
    return tuple(found)


def numbered(counts: Sequence[int], *, in_turn: bool) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each replica's micro-batches, ascending."""
    total = sum(counts)
    if not in_turn:
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return tuple(tuple(range(end - n, end)) for end, n in zip(ends, counts, strict=True))
    turns = sorted((((k + 0.5) / n), i) for i, n in enumerate(counts) for k in range(n))
    assert len(turns) == total
    return tuple(
        tuple(micro for micro, (_, who) in enumerate(turns) if who == i) for i in range(len(counts))
    )
