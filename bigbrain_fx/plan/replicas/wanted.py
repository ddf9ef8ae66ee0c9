"""Options -> how many replicas were asked for, and whether each has devices enough."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.fold import FOLDS
from bigbrain_fx.plan.nouns import Options


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
