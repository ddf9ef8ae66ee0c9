"""Cuts of torchgpipe's published code, as placements of our ops.

A cut is not chosen by the forecast here: a row is of the balance that it was measured with. Layers
are torchgpipe's own (benchmarks/*/main.py at v0.0.7), counted along our captured ops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from bigbrain_fx.core import Graph, Op, Placement

_Run = tuple[int, int]
"""How many GPUs, and how many micro-batches."""

_RESNET = {
    (2, 1667): (135, 235),
    (4, 256): (44, 92, 124, 110),
    (8, 150): (26, 22, 33, 44, 44, 66, 66, 69),
}
_UNET = {
    (2, 32): (104, 137),
    (4, 16): (30, 66, 84, 61),
    (8, 40): (16, 27, 31, 44, 22, 57, 27, 17),
}
_AMOEBA = {
    (2, 1): (7, 17),
    (2, 4): (9, 15),
    (2, 32): (9, 15),
    (4, 1): (3, 4, 5, 12),
    (4, 4): (3, 6, 7, 8),
    (4, 32): (3, 6, 7, 8),
    (8, 1): (2, 2, 2, 2, 2, 3, 4, 7),
    (8, 4): (2, 2, 2, 3, 3, 4, 4, 4),
    (8, 32): (2, 2, 2, 3, 3, 4, 4, 4),
}
BALANCES: Mapping[str, Mapping[_Run, Sequence[int]]] = {
    "resnet101": _RESNET,
    "unet(5,64)": _UNET,
    "amoebanet-d(18,256)": _AMOEBA,
}
"""Layers of each GPU, by model."""


def balanced(graph: Graph, name: str, gpus: int, micro_batches: int) -> Placement | None:
    """Return where a run's ops were; None of one that is not torchgpipe's."""
    layers = BALANCES.get(name, {}).get((gpus, micro_batches))
    if layers is None:
        return None
    ends = tuple(accumulate(layers))
    numbers = accumulate(_LAYERS[name](graph), max)  # counters of norms stand before them
    homes = {
        op.name: f"d{bisect_right(ends[:-1], number)}"
        for op, number in zip(graph.ops, numbers, strict=True)
    }
    return Placement(homes, "as torchgpipe's benchmarks cut it")


def _kind(op: Op) -> str:
    return op.target.split(".")[1]


def _unet_layers(graph: Graph) -> Iterator[int]:
    """Count one layer an op, and what keeps a skip before each pool."""
    layer = -1
    for op in graph.ops:
        layer += 2 if _kind(op) == "max_pool2d" else 1
        yield layer


def _amoeba_layers(graph: Graph) -> Iterator[int]:
    """Count the stem, then cells: each ends by joining three states or four."""
    layer = 0
    for op in graph.ops:
        yield layer
        ends_stem = layer == 0 and _kind(op) == "batch_norm"
        layer += ends_stem or (_kind(op) == "cat" and len(op.refs) >= _FEWEST_STATES)


def _resnet_layers(graph: Graph) -> Iterator[int]:
    """Count four layers, eleven a block, and three: by names of weights, and what has none."""
    blocks: dict[str, int] = {}
    layer = 0
    for op in graph.ops:
        if op.params:
            layer = _resnet_layer(op.params[0], blocks)
        else:
            layer += 1
        yield layer


def _resnet_layer(weight: str, blocks: dict[str, int]) -> int:
    """Return the layer of a weight: "layer1.0.conv2.weight" is the fifth of its block."""
    parts = weight.split(".")
    if len(parts) < _OF_BLOCK:
        return {"conv1": 0, "bn1": 1, "fc": 369}[parts[0]]
    first = 4 + 11 * blocks.setdefault(".".join(parts[:2]), len(blocks))
    inside = ("identity", "conv1", "bn1", "", "conv2", "bn2", "", "conv3", "bn3", "downsample")
    return first + inside.index(parts[2])


_FEWEST_STATES = 3
_OF_BLOCK = 4
_LAYERS: Mapping[str, Callable[[Graph], Iterator[int]]] = {
    "resnet101": _resnet_layers,
    "unet(5,64)": _unet_layers,
    "amoebanet-d(18,256)": _amoeba_layers,
}
