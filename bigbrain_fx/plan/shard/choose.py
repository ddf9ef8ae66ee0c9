"""Axes -> those that are split together: the cheapest for the work they divide, none in the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bigbrain_fx.core import Axis, Graph
from bigbrain_fx.plan.shard.rewrite import exchanges


def priced_axes(graph: Graph, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Note for each axis what splitting it alone would send."""
    return tuple(replace(axis, exchanges=exchanges(graph, [axis])) for axis in axes)


def of_layers(axis: Axis) -> str:
    """Return the name that axes of alike layers share: `blocks.*:hidden`."""
    return re.sub(r"\d+", "*", axis.name)


def chosen_axes(axes: Iterable[Axis], members: int, kinds: Sequence[str] = ()) -> tuple[Axis, ...]:
    """Choose axes that do not meet, those first that send least for the work they divide.

    Args:
        axes: priced_axes.
        members: of the group; an axis has at least as many parts.
        kinds: to choose from; all when none is named.
    """
    fit = [axis for axis in axes if axis.size >= members and axis.flops and axis.params]
    fit = [axis for axis in fit if not kinds or axis.kind in kinds]
    taken: list[Axis] = []
    busy: set[str] = set()
    for axis in sorted(fit, key=_price):
        names = {place.name for place in (*axis.params, *axis.values)}
        if not names & busy:
            taken.append(axis)
            busy |= names
    return tuple(taken)


def _price(axis: Axis) -> float:
    sent = axis.sent_bytes(backward=False) + axis.sent_bytes(backward=True)
    return sent / axis.flops
