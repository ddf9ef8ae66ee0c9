"""Where improvers begin: what other methods find, and an equal split.

It knows methods by their classes only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import NoPlanError
from partitioners.chain_dp import ChainDP
from partitioners.judge import Homes, Judge
from partitioners.m_etf import METF


class Method(Protocol):
    """Whatever places a graph."""

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op."""
        ...


def good_start(judge: Judge) -> Homes:
    """Return chain-dp's split, or m-etf's placement where no contiguous split fits.

    Raises:
        NoPlanError: neither fits; with chain-dp's arithmetic.
    """
    chain = ChainDP(judge.micro_batches, judge.in_flight)
    try:
        return judge.homes(chain.partition(judge.graph, judge.cluster, judge.costs))
    except NoPlanError as error:
        other = tried(judge, [METF(judge.micro_batches, judge.in_flight)])
        if not other:
            raise error from None
        return other[0]


def start_of(judge: Judge, unaided: bool) -> tuple[Homes, str]:
    """Return where an improver begins, and what that is called.

    Args:
        judge: of the placements.
        unaided: begin with a plain start, if one fits; else with a good one.

    Raises:
        NoPlanError: nothing to begin with fits.
    """
    plain = plain_start(judge) if unaided else None
    return (plain, "an equal split") if plain else (good_start(judge), "a split by chain-dp")


def plain_start(judge: Judge) -> Homes | None:
    """Return the first of these that fits: as many units for each device, or all on one."""
    count, devices = len(judge.known.groups), len(judge.cluster.devices)
    equal = tuple(unit * devices // count for unit in range(count))
    return next((homes for homes in (equal, *one_device_each(judge)) if judge.fits(homes)), None)


def one_device_each(judge: Judge) -> list[Homes]:
    """Return, for every device, the placement of everything there."""
    count = len(judge.known.groups)
    return [(device,) * count for device in range(len(judge.cluster.devices))]


def tried(judge: Judge, methods: Iterable[Method]) -> list[Homes]:
    """Return what these methods find, and the judge finds to fit."""
    found = []
    for method in methods:
        try:
            placement = method.partition(judge.graph, judge.cluster, judge.costs)
        except NoPlanError:
            continue
        homes = judge.homes(placement)
        if judge.fits(homes):
            found.append(homes)
    return found
