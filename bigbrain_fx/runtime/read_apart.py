"""Batches that are read for another purpose than training: a file's own generators stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .own_dice import own_dice, set_states, states_of


def has_generators(function: object) -> bool:
    """Whether a function leads to generators of a file's own."""
    return bool(own_dice(function))


@contextmanager
def left_alone(function: object) -> Iterator[None]:
    """Let what is drawn within move none of a file's own generators."""
    dice = own_dice(function)
    states = states_of(dice)
    try:
        yield
    finally:
        set_states(dice, states)
