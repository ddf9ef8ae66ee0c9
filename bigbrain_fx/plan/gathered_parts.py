"""Replicas with ZeRO 3 -> the same with breaks: parts of the model whose weights come one by one.

    embed | blocks.0 blocks.1 | blocks.2 blocks.3 | head      a part is a stage: its weights are
                                                             there while it runs, and no others

A device would else gather all of its weights at once, and save nothing where it holds most. Parts
end where a layer or a repeated block does. This file knows ops and parameters; it knows no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bigbrain_fx.core import Graph, Placement
from bigbrain_fx.planning import live_ops, units

PARTS = (8, 16, 32)
"""Into so many, about, a device's weights are divided: its file grows no further with depth.

Into the least of them with which a plan fits.
"""
LEAST_PART = 256 << 10
"""Bytes below which a part would cost more in latency than it saves."""


@dataclass(frozen=True)
class _ModelLayer:
    """Neighbouring ops of one layer or one repeated block, and the weights that they read."""

    first: str
    params: frozenset[str]


def in_parts(graph: Graph, placement: Placement, rows: int) -> Iterator[Placement]:
    """Begin a stage, in all replicas alike, wherever the weights of one would be too many.

    A device's part of the model comes to about `PARTS` stages: first few large ones, then smaller
    ones, which take less memory, down to a layer each.
    """
    layers, sizes = [*_layers(graph, rows)], _sizes(graph)
    devices = max(len(set(each.device_of.values())) for each in placement.replicas)
    most_bytes = (max(LEAST_PART, sum(sizes.values()) // (n * devices)) for n in PARTS)
    for breaks in dict.fromkeys(tuple(_breaks(layers, sizes, most)) for most in most_bytes):
        yield _broken(placement, breaks)


def _broken(placement: Placement, breaks: tuple[str, ...]) -> Placement:
    replicas = tuple(
        replace(each, breaks=tuple(dict.fromkeys((*each.breaks, *breaks))))
        for each in placement.replicas
    )
    return replace(placement, replicas=replicas)


def breaks_at_layers(graph: Graph, rows: int) -> tuple[str, ...]:
    """Return the first op of each layer, small ones together: weights come as they are needed."""
    return tuple(_breaks([*_layers(graph, rows)], _sizes(graph), LEAST_PART))


def _breaks(layers: list[_ModelLayer], sizes: dict[str, int], most_bytes: int) -> Iterator[str]:
    held: frozenset[str] = frozenset()
    for layer in layers:
        together = held | layer.params
        if held and layer.params and sum(sizes[name] for name in together) > most_bytes:
            yield layer.first
            together = layer.params
        held = together


def _sizes(graph: Graph) -> dict[str, int]:
    """Return the bytes of each trained parameter, by canonical name."""
    return {name: param.spec.nbytes for name, param in graph.trained.items()}


def _layers(graph: Graph, rows: int) -> Iterator[_ModelLayer]:
    """Yield the layers in the order in which they run; a unit is never divided."""
    live, sizes = live_ops(graph), _sizes(graph)
    where, first, params = "", "", set[str]()
    for group in units(graph.at(rows)).groups:
        ops = [graph.op[name] for name in group if name in live]
        if not ops:
            continue
        here = ops[0].layer or ops[0].module_path
        if first and here != where:
            yield _ModelLayer(first, frozenset(params))
            first, params = "", set()
        where, first = here, first or ops[0].name
        read = {graph.param[name].canonical for op in ops for name in op.params}
        params |= read & sizes.keys()
    if first:
        yield _ModelLayer(first, frozenset(params))


def in_layers(graph: Graph, placement: Placement, rows: int) -> Placement:
    """Begin a stage at each layer that has weights worth moving."""
    breaks = dict.fromkeys((*placement.breaks, *breaks_at_layers(graph, rows)))
    return replace(placement, breaks=tuple(breaks))
