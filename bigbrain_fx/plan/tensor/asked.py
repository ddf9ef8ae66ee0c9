"""Options with --tensor-parallel -> refusals, and the axes to try. The module plans nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.core import Axis, Cluster, Graph, shortened
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import AUTO, Case, Options, Plan
from bigbrain_fx.plan.replicas import divide, replica_count
from bigbrain_fx.plan.schedule import traits
from bigbrain_fx.plan.shard import (
    axes,
    between,
    chosen_axes,
    of_layers,
    priced_axes,
    table_axes,
    without,
)
from bigbrain_fx.plan.simulate.messages import Ring
from bigbrain_fx.plan.tensor.messages import sum_s

_NAMES = 12  # of axes, that a message lists


def tensor_is_open(options: Options) -> bool:
    """Whether the planner may choose groups: it was asked to, or nothing of that kind was."""
    if options.tensor == 0:
        return True
    by_hand = options.pins or options.place or options.tensor_shares
    return options.tensor is None and options.partitioner == AUTO and not by_hand


def require_possible(cluster: Cluster, options: Options) -> None:
    """Refuse what does not go with groups of devices, before anything is tried or planned."""
    count, shares = options.tensor or 1, options.tensor_shares
    if shares and len(shares) != count:
        raise InputError(
            f"{len(shares)} shares for {count} devices that compute together",
            code="BX1328",
            at="--tp-ratio",
            help=f"give one share for each: --tensor-parallel {len(shares)}"
            if len(cluster.devices) % len(shares) == 0
            else f"give one share for each: --tp-ratio {':'.join(['1'] * count)}, say",
        )
    if options.all_reduce_order == "backend":
        raise InputError(
            "--all-reduce-order backend sums gradients of replicas, and this plan has one "
            "replica: inside "
            "a tensor group sums are the bundle's own messages",
            code="BX1344",
            help="add --replicas 2 or more, or leave --all-reduce-order out",
        )
    if traits(options.schedule).fold and len(cluster.devices) == count:
        raise InputError(
            f"schedule '{options.schedule}' goes over several groups of devices, and these "
            f"{count} devices are one",
            code="BX1330",
            at="--schedule",
            help="use --schedule 1f1b, or a cluster of more devices",
        )
    if len(cluster.devices) % count:
        fitting = [n for n in range(2, len(cluster.devices) + 1) if not len(cluster.devices) % n]
        listed = " or ".join(f"--tensor-parallel {n}" for n in fitting)
        raise InputError(
            f"groups of {count} devices, and the cluster has {len(cluster.devices)}",
            code="BX1331",
            at="--tensor-parallel",
            help=f"use {listed}, or a cluster of a multiple of {count} devices"
            if fitting
            else f"use a cluster of a multiple of {count} devices",
        )


def require_grid(cluster: Cluster, options: Options) -> None:
    """Refuse what does not go with replicas of tensor groups, before anything is planned."""
    replicas = replica_count(cluster, options)
    members = options.tensor or 1
    for number, group in enumerate(divide(cluster, replicas, members)):
        if len(group) % members:
            raise InputError(
                f"groups of {members} devices, and replica {number} of {replicas} has {len(group)}",
                code="BX1333",
                at="--tensor-parallel",
                help=f"use a cluster of a multiple of {members * replicas} devices, or name each "
                'replica\'s under "replicas" in the cluster file',
            )


def require_no_groups(plan: Plan, what: str, help_: str) -> None:
    """Refuse for a plan with groups of devices what is not there for them yet."""
    if plan.placement.tensor is not None:
        raise InputError(
            f"{what} does not go with --tensor-parallel yet, and this bundle's devices compute in "
            "groups "
            f"of {plan.placement.tensor.members}",
            code="BX1334",
            help=help_,
        )


def wanted_axes(graph: Graph, options: Options) -> tuple[Axis, ...]:
    """Return the axes to split: those that were named, or all that do not meet.

    The sequence, where it is named, is divided wherever the others leave it.

    Raises:
        InputError: a name is of no axis, or none has as many parts as there are ranks.
    """
    if options.tensor_tried:
        return priced_axes(graph, options.tensor_tried)
    named, members = named_axes(graph, options), options.tensor or 1
    found = chosen_axes(named, members)
    if options.tensor_axes:
        by_name = [axis for axis in named if axis.name in options.tensor_axes]
        found = (*found, *table_axes(by_name, found, members))
        found = with_sequence(graph, named, found, members)
    if not found:
        raise _none_fits(graph, named, members)
    return found


def with_sequence(
    graph: Graph, every: Sequence[Axis], chosen: Sequence[Axis], members: int
) -> tuple[Axis, ...]:
    """Return the chosen axes, and what they leave of the sequence."""
    left = [axis for axis in between(graph, every, chosen) if axis.size >= members]
    return (*chosen, *priced_axes(graph, left))


def named_axes(graph: Graph, options: Options) -> tuple[Axis, ...]:
    """Return the axes that may be split: all, or those that were named; failed rules left out.

    Raises:
        InputError: a name is of no axis.
    """
    every = axes(graph)
    named = every
    if options.tensor_axes:
        _require_known(every, options.tensor_axes)
        named = tuple(a for a in every if set(_names(a)) & set(options.tensor_axes))
    return priced_axes(graph, without(graph, named, options.tensor_whole))


def _names(axis: Axis) -> tuple[str, str, str]:
    """Return what an axis is called: its kind, its own name, and as `explain` gathers layers."""
    return axis.kind, axis.name, of_layers(axis)


def _require_known(every: Sequence[Axis], asked: Sequence[str]) -> None:
    kinds = sorted({axis.kind for axis in every})
    known = list(dict.fromkeys((*kinds, *(name for axis in every for name in _names(axis)))))
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            listed = ", ".join(close or kinds) or "none"
            raise InputError(
                f"the model has no axis '{name}'",
                code="BX1335",
                at="--tp-axes",
                help=f"{'the nearest are' if close else 'it has'} {listed}; {_all_names(every)}",
            )


def _all_names(every: Sequence[Axis]) -> str:
    """List the axes by their own names, alike layers in one, those first that divide most work."""
    names = [*dict.fromkeys(map(of_layers, every))]
    return f"by name {shortened(names, _NAMES)}"


def _none_fits(graph: Graph, axes: Sequence[Axis], members: int) -> InputError:
    sizes = [axis.size for axis in axes if axis.flops and axis.params]
    if sizes and max(sizes) > 1:
        return InputError(
            f"no axis can be split over {members} TP ranks: the longest has {max(sizes)}",
            code="BX1336",
            at="--tensor-parallel",
            help=f"use --tensor-parallel {max(sizes)} or fewer",
        )
    return InputError(
        f"{graph.name} has no axis that can be split: no dimension of its parameters runs through "
        "ops with rules",
        code="BX1337",
        at="--tensor-parallel",
        help="leave --tensor-parallel out: pipelines and replicas need no axis",
    )


# ------------------------------------------------------------------------------------------------
# Embedding tables that a group divides since its replicas would sum them: no work, but bytes.
#
#   replica 0  |rows 0..n/2|rows n/2..n|         each rank sums its rows with those of the same
#              ─────┼────────────┼──────         rank elsewhere, in place of the whole table twice
#   replica 1  |rows 0..n/2|rows n/2..n|
#
# A lookup divides no work, so that axes are not chosen for it. It costs a sum of what was looked
# up inside of the group, and saves a part of sums between replicas, whose links are slower as a
# rule.


def axes_of_replicas(case: Case) -> tuple[Axis, ...]:
    """Return the axes that all replicas divide: those of their work, and tables where that pays.

    Raises:
        InputError: as `wanted_axes` does.
    """
    graph, cluster, options = case.graph, case.cluster, case.options
    chosen = wanted_axes(graph, options)
    if options.tensor_tried or options.tensor_axes:
        return chosen
    members = options.tensor or 1
    left = table_axes(named_axes(graph, options), chosen, members)
    replicas = divide(cluster, replica_count(cluster, options), members)
    sums = _Sums(cluster, options, replicas)
    return (*chosen, *(axis for axis in left if sums.saved_s(axis) > sums.paid_s(axis)))


def with_tables(graph: Graph, options: Options) -> Options | None:
    """Return options that divide what is chosen and all tables; None: there are none, or axes.

    Raises:
        InputError: as `wanted_axes` does.
    """
    chosen = wanted_axes(graph, options)
    tables = table_axes(named_axes(graph, options), chosen, options.tensor or 1)
    is_given = options.tensor_tried or options.tensor_axes
    return replace(options, tensor_tried=(*chosen, *tables)) if tables and not is_given else None


class _Sums:
    """Times of sums between replicas, and inside of their groups."""

    def __init__(
        self, cluster: Cluster, options: Options, replicas: Sequence[Sequence[str]]
    ) -> None:
        self.cluster, self.replicas, self.members = cluster, replicas, options.tensor or 1
        self.micro_batches = options.micro_batches or 1

    def saved_s(self, axis: Axis) -> float:
        """Return what replicas' sums take less: rings, of all ranks beside each other."""
        count, ring = len(self.replicas), Ring(self.cluster, tuple(r[0] for r in self.replicas))
        nbytes = 2 * (count - 1) * axis.nbytes * (1 - 1 / self.members) / count
        shared = (self.members * taken for taken in ring.nics_s(int(nbytes)).values())
        return max(ring.wire_s(int(nbytes)), *shared, 0.0)

    def paid_s(self, axis: Axis) -> float:
        """Return what a replica's micro-batches take to add up what their ranks looked up."""
        group, many = self.replicas[0][: self.members], len(self.replicas) * self.micro_batches
        sent = axis.sent_bytes(backward=False), axis.sent_bytes(backward=True)
        return self.micro_batches * sum(sum_s(n // many, self.cluster, group) for n in sent if n)
