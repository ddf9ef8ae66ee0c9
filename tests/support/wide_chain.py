"""Linear layers in a row whose sizes are arithmetic over the batch: what replicas divide."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

from bigbrain_fx.core import Graph, Input, Op, Param, ParamRef, Ref, TensorSpec

WIDTHS = (256, 512, 1024)


def wide_chain(seed: int, layers: int, rows: int = 256) -> Graph:
    """Draw widths of layers; each is a product with a weight, then a pass over its result."""
    dice = random.Random(seed)
    widths = [WIDTHS[0], *(dice.choice(WIDTHS) for _ in range(layers))]
    weights = tuple(
        Param(f"w{i}", _floats(widths[i + 1], widths[i], grad=True), f"w{i}") for i in range(layers)
    )
    loss = Op(
        "loss",
        "aten.mean.default",
        (Ref(f"gelu_{layers - 1}"),),
        outputs=(TensorSpec((), "float32", (), True),),
        flops=f"{widths[-1]}*B",
        reads_bytes=f"{4 * widths[-1]}*B",
        writes_bytes=4,
    )
    entry = Input("x", ("x",), _floats("B", widths[0], grad=False))
    ops = (*_layers(widths), loss)
    return Graph("wide chain", ops, (entry,), weights, (), "loss", batch=rows)


def _layers(widths: list[int]) -> Iterator[Op]:
    for i, (deep, wide) in enumerate(pairwise(widths)):
        source, out = Ref(f"gelu_{i - 1}" if i else "x"), (_floats("B", wide, grad=True),)
        yield Op(
            f"linear_{i}",
            "aten.linear.default",
            (source, ParamRef(f"w{i}")),
            outputs=out,
            flops=f"{2 * deep * wide}*B",
            reads_bytes=f"{4 * deep}*B + {4 * deep * wide}",
            writes_bytes=f"{4 * wide}*B",
        )
        yield Op(
            f"gelu_{i}",
            "aten.gelu.default",
            (Ref(f"linear_{i}"),),
            outputs=out,
            flops=f"{8 * wide}*B",
            reads_bytes=f"{4 * wide}*B",
            writes_bytes=f"{4 * wide}*B",
        )


def _floats(*shape: int | str, grad: bool) -> TensorSpec:
    return TensorSpec(shape, "float32", (shape[-1], 1), grad)
