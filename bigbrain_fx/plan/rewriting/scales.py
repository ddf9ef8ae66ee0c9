"""A number that scales a product -> the same number on the product's smaller operand.

    softmax((q @ k.T) / 8)      becomes      softmax((q / 8) @ k.T)

Attention's scores have a number for each pair of positions, the queries for each position only. A
power of two moves without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
        if written & {op.name, *product.refs} or graph.consumers[product.name] != (op.name,):
            continue
        side = _smaller(graph, product)
        if side is not None:
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
    sizes = [_spec(graph, arg.value).at(rows).numel for arg in product.args if _is_value(arg)]
    if len(sizes) != 2 or min(sizes) >= product.outputs[0].at(rows).numel:
        return None
    specs = [_spec(graph, ref) for ref in product.refs]
    side = sizes.index(min(sizes))
    return side if specs[min(side, len(specs) - 1)].dtype == product.outputs[0].dtype else None


def _is_value(arg: object) -> bool:
    return isinstance(arg, Ref)


def _spec(graph: Graph, name: str) -> TensorSpec:
    return graph.input[name].spec if name in graph.input else graph.op[name].outputs[0]


def _place(graph: Graph, op: Op, product: Op, side: int) -> RewritePlace:
    operand = product.args[side]
    assert isinstance(operand, Ref)
    spec, name = _spec(graph, operand.value), fresh(graph, f"{op.name}_operand")
    nbytes = dict(flops=0, reads_bytes=0, writes_bytes=0)
    scaled = made_like(op, name, op.target, (operand, *op.args[1:]), (spec,), **nbytes)
    args = (*product.args[:side], Ref(name), *product.args[side + 1 :])
    moved = made_like(
        product,
        op.name,
        product.target,
        args,
        product.outputs,
        flops=product.flops,
        reads_bytes=product.reads_bytes,
        writes_bytes=product.writes_bytes,
    )
    alike = repr((side, op.args[1:], op.target, spec, product.outputs))
    layers = (op.module_path or op.name,)
    return RewritePlace("scales", (product.name, op.name), op.name, (scaled, moved), layers, alike)
