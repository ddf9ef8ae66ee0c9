"""Axes -> those that are split together: the cheapest for the work they divide, none in the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bigbrain_fx.core import Axis, Exchange, Graph
from bigbrain_fx.plan.shard.rewrite import exchanges

_PRICED = "_priced"  # as a cached property is: a graph is frozen
_DEAR = 10
"""Times what is sent for divided work on average: more may not be sent for more of it."""


def priced_axes(graph: Graph, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Note for each axis what splitting it alone would send.

    Pieces, names and trials ask for the same axes, hundreds of a large model, each once more.
    """
    known: dict[Axis, tuple[Exchange, ...]] = graph.__dict__.setdefault(_PRICED, {})
    found = []
    for axis in axes:
        key = replace(axis, name="", exchanges=())
        if key not in known:
            known[key] = exchanges(graph, [axis])
        found.append(replace(axis, exchanges=known[key]))
    return tuple(found)


def of_layers(axis: Axis) -> str:
    """Return the name that axes of alike layers share: `blocks.*:hidden`."""
    return re.sub(r"\d+", "*", axis.name)


def chosen_axes(axes: Iterable[Axis], members: int, kinds: Sequence[str] = ()) -> tuple[Axis, ...]:
    """Choose axes that do not meet, those first that send least for the work they divide.

    One that divides more than all that it meets takes their place, unless that is dear.

    Args:
        axes: priced_axes.
        members: of the group; an axis has at least as many parts.
        kinds: to choose from; all when none is named.
    """
    fit = (axis for axis in axes if axis.size >= members and axis.flops and axis.params)
    wanted = [_Candidate(axis) for axis in fit if not kinds or axis.kind in kinds]
    wanted.sort(key=_Candidate.price)
    taken, other = _added([], wanted), None
    while (other := _dividing_more(taken, wanted)) is not None:
        taken = other
    return tuple(each.axis for each in sorted(taken, key=_Candidate.price))


def table_axes(axes: Iterable[Axis], chosen: Sequence[Axis], members: int) -> tuple[Axis, ...]:
    """Return the axes that divide parameters and no work, as embeddings', where chosen ones end."""
    busy, found = set[str]().union(*map(_names, chosen)), []
    for axis in (axis for axis in axes if axis.params and not axis.flops):
        if axis.size >= members and busy.isdisjoint(_names(axis)):
            found.append(axis)
            busy |= _names(axis)
    return tuple(found)


def _names(axis: Axis) -> set[str]:
    return {place.name for place in (*axis.params, *axis.values)}


class _Candidate:
    """An axis, with what it divides, sends and lies in."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.flops = axis, axis.flops
        self.sent = axis.sent_bytes(backward=False) + axis.sent_bytes(backward=True)
        self.names = _names(axis)

    def price(self) -> float:
        """Return the bytes that are sent for a unit of divided work."""
        return self.sent / self.flops


def _added(taken: Sequence[_Candidate], wanted: Iterable[_Candidate]) -> list[_Candidate]:
    """Add those that meet none so far, one by one."""
    found = [*taken]
    busy = {name for each in taken for name in each.names}
    for each in wanted:
        if each.names.isdisjoint(busy):
            found.append(each)
            busy |= each.names
    return found


def _dividing_more(
    taken: Sequence[_Candidate], wanted: Sequence[_Candidate]
) -> list[_Candidate] | None:
    """Return a choice that divides more: with one axis in the place of all that it meets."""
    own = {name: each for each in taken for name in each.names}
    for one in sorted(wanted, key=lambda each: -each.flops):
        met = {own[name] for name in one.names & own.keys()}
        if one in met or one.flops <= sum(each.flops for each in met):
            continue
        other = _added([one, *(each for each in taken if each not in met)], wanted)
        if _is_worth_it(taken, other):
            return other
    return None


def _is_worth_it(taken: Sequence[_Candidate], other: Sequence[_Candidate]) -> bool:
    work, more = (sum(each.flops for each in own) for own in (taken, other))
    sent, most = (sum(each.sent for each in own) for own in (taken, other))
    return more > work and (most - sent) * work <= _DEAR * sent * (more - work)


def is_dear(axis: Axis, chosen: Iterable[Axis]) -> bool:
    """Whether too much is sent for what an axis divides, beside what others send for theirs."""
    taken = [_Candidate(each) for each in chosen]
    return not _is_worth_it(taken, [*taken, _Candidate(axis)])
