"""Options -> whether replicas were asked for, and what of it cannot be. It plans nothing."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.fold import FOLDS
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.schedule import SPLIT


def wants_replicas(graph: Graph, cluster: Cluster, options: Options) -> bool:
    """Whether replicas were asked for: by option, or for training by the cluster file.

    Raises:
        InputError: something was asked for that only replicas have.
    """
    asked = _are_asked(cluster, options, trains=graph.training)
    if not asked:
        require_one(options)
    return asked


def replica_count(cluster: Cluster, options: Options) -> int:
    """Return how many replicas were asked for, by option or by the cluster file; 1: none."""
    return options.replicas or len(options.replica_shares) or len(cluster.replicas) or 1


def require_replica_options(cluster: Cluster, options: Options, *, trains: bool) -> None:
    """Refuse what replicas cannot do, or what only they can, whatever the model is."""
    if not _are_asked(cluster, options, trains=trains):
        require_one(options)
    elif options.replicas != 0:  # of any number, the planner tells
        require_zero(options)


def _are_asked(cluster: Cluster, options: Options, *, trains: bool) -> bool:
    if options.all_reduce_order == "tree":
        return True  # of one replica, too: it has the bits of any number of them
    named = (cluster.replicas and trains) or len(options.replica_shares) > 1
    return bool(named) if options.replicas is None else options.replicas != 1


def require_one(options: Options) -> None:
    """Refuse for one replica what several have."""
    if options.zero_stage:
        raise InputError(
            f"--zero {options.zero_stage} shares among replicas, and this plan has one",
            code="BX1291",
            help="add --replicas 2, or more",
        )
    count = len(options.replica_shares)
    if count:
        raise InputError(
            f"{count} shares, and this plan has one replica" if count > 1 else "one share is all",
            code="BX1292",
            at="--replica-shares",
            help=f"add --replicas {count}" if count > 1 else "3:1 gives two replicas their shares",
        )


def require_sensible(graph: Graph, options: Options) -> None:
    """Refuse what replicas cannot do, before any work is done."""
    if graph.loss is None or not graph.training:
        raise InputError(
            "nothing is trained in inference: --replicas is for training",
            code="BX1293",
            help="leave it out; to infer faster, start the bundle several times",
        )
    require_zero(options)
    shares = options.replica_shares
    if shares and options.replicas not in (None, 0, len(shares)):
        raise InputError(
            f"{len(shares)} shares for {options.replicas} replicas",
            code="BX1294",
            at="--replica-shares",
            help=f"give one share for each: --replicas {len(shares)}",
        )


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


def require_zero(options: Options) -> None:
    """Refuse what a stage of ZeRO does not go with."""
    zero = f"--zero {options.zero_stage}"
    if options.zero_stage >= 2 and options.sum_order == "replica":
        raise InputError(
            f"{zero} keeps no replica's own sum of gradients, which --sum-order replica adds up",
            code="BX1296",
            help="leave --sum-order out, which gives micro, or use --sum-order tree",
        )
    if options.zero_stage == 3 and options.all_reduce_order == "backend":
        raise InputError(
            f"{zero} gathers weights when the plan says, and --sum-order backend has no such plan",
            code="BX1297",
            help="use --zero 2, or --sum-order micro",
        )
    splits = options.schedule in SPLIT and options.defer != ()
    if options.zero_stage == 3 and (splits or options.defer):
        raise InputError(
            f"{zero} lets go of a stage's weights after its backward, and a split backward has "
            "more to do later",
            code="BX1298",
            help="use --zero 2, --defer none, or a schedule whose backwards are whole: 1f1b, "
            "gpipe, interleaved, list",
        )
