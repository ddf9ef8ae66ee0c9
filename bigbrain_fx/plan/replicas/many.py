"""How many replicas a plan has room for: messages grow as their square.

This file knows numbers only.
"""

from __future__ import annotations

from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.replica_cut import BUCKETS

MOST_MESSAGES = 2_000_000
"""Of a step, for sums: more would fill the memory of who plans, and of who runs it."""


def has_many_messages(replicas: int) -> bool:
    """Whether so many replicas are too many for a bundle."""
    return _messages(replicas) > MOST_MESSAGES


def require_few_messages(replicas: int) -> None:
    """Refuse replicas whose sums a plan could not list.

    Raises:
        InputError: says how many there may be.
    """
    if not has_many_messages(replicas):
        return
    most = next(n for n in range(replicas, 0, -1) if not has_many_messages(n))
    raise InputError(
        f"{replicas:,} replicas that each send to each other are {_messages(replicas):,} messages "
        f"a step for one stage alone, and a plan has room for {MOST_MESSAGES:,}",
        code="BX1283",
        at="--replicas",
        help=f"use at most --replicas {most}, each of several devices",
    )


def _messages(replicas: int) -> int:
    return 2 * BUCKETS * replicas * (replicas - 1)
