"""A number that scales a product -> the same number on the product's smaller operand.

    softmax((q @ k.T) / 8)      becomes      softmax((q / 8) @ k.T)

Attention's scores have a number for each pair of positions, the queries for each position only. A
power of two moves without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Graph, Op, Ref, RewritePlace, TensorSpec
from bigbrain_fx.plan.rewriting.making import fresh, is_plain, made_like
from bigbrain_fx.planning import mutated_roots

_PRODUCTS = ("aten.matmul.default", "aten.bmm.default", "aten.mm.default")
_SCALES = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
_FLOATS = ("float32", "float64", "bfloat16", "float16")


def find(graph: Graph) -> Iterator[RewritePlace]:
    """Yield the places where all of a product is scaled by a number."""
    written = mutated_roots(graph)
    for op in graph.ops:
        product = _scaled(graph, op)
        if product is None or not is_plain(graph, product.name, written):
            continue
        is_free = not written & {op.name, *product.refs}
        side = _smaller(graph, product)
        if is_free and side is not None and graph.consumers[product.name] == (op.name,):
            yield _place(graph, op, product, side)


def _scaled(graph: Graph, op: Op) -> Op | None:
    """Return the product that an op scales by a number; None for anything else."""
    match op.args:
        case (Ref(value), float() | int() as number) if value in graph.op:
            made = graph.op[value]
            fits = op.target in _SCALES and made.target in _PRODUCTS and not op.kwargs
            known = not isinstance(number, bool) and math.isfinite(number) and number != 0
            same = op.outputs == made.outputs and op.outputs[0].dtype in _FLOATS
            return made if fits and known and same else None
    return None


def _smaller(graph: Graph, product: Op) -> int | None:
    """Return the place of the operand with the fewest numbers, if it has fewer than the result."""
    rows = graph.static_batch or graph.batch
    specs = [_spec(graph, arg.value) for arg in product.args if isinstance(arg, Ref)]
    if len(specs) != 2:
        return None
    sizes = [spec.at(rows).numel for spec in specs]
    side = sizes.index(min(sizes))
    fits = sizes[side] < product.outputs[0].at(rows).numel
    return side if fits and specs[side].dtype == product.outputs[0].dtype else None


def _spec(graph: Graph, name: str) -> TensorSpec:
    return graph.input[name].spec if name in graph.input else graph.op[name].outputs[0]


def _place(graph: Graph, op: Op, product: Op, side: int) -> RewritePlace:
    operand = product.args[side]
    assert isinstance(operand, Ref)
    spec, name = _spec(graph, operand.value), fresh(graph, f"{op.name}_operand")
    scaled = made_like(op, name, op.target, (operand, *op.args[1:]), (spec,), moves=spec)
    args = (*product.args[:side], Ref(name), *product.args[side + 1 :])
    moved = replace(product, name=op.name, args=args, saves=None)
    alike = repr((side, op.args[1:], op.target, spec, product.outputs))
    layers = (op.module_path or op.name,)
    return RewritePlace("scales", (product.name, op.name), op.name, (scaled, moved), layers, alike)
