"""Options -> how many replicas were asked for; whether each has devices enough, and a plan room.

Messages of their sums grow as the square of their number.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.fold import FOLDS
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replica_cut import BUCKETS

MOST_MESSAGES = 2_000_000
"""Of a step, for sums: more would fill the memory of who plans, and of who runs it."""


def replica_count(cluster: Cluster, options: Options) -> int:
    """Return how many replicas were asked for, by option or by the cluster file; 1: none."""
    return options.replicas or len(options.replica_shares) or len(cluster.replicas) or 1


def require_room_to_fold(options: Options, groups: Sequence[Sequence[str]]) -> None:
    """Refuse a schedule that folds a line of devices where a replica has but one of them.

    Args:
        options: of all replicas.
        groups: the devices of each.
    """
    single = [own for own in groups if len(own) == (options.tensor or 1)]
    if options.schedule in FOLDS and len(groups) > 1 and single:
        what = "device" if len(single[0]) == 1 else "tensor group"
        raise InputError(
            f"schedule '{options.schedule}' goes over several {what}s, and {len(single)} of "
            f"{len(groups)} replicas {'has' if len(single) == 1 else 'have'} one",
            code="BX1295",
            at="--schedule",
            help="leave --replicas out, use --schedule 1f1b, or a cluster of more devices",
        )


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
