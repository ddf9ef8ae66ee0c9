"""Linear layers that read one value -> one product with their weights joined, and its parts.

    q, k, v = x @ Wq.T, x @ Wk.T, x @ Wv.T      becomes      q, k, v = split(x @ cat(Wq, Wk, Wv).T)

Weights are joined where they are used: parameters stay what they are, each with its own gradient.
Source: Unity, OSDI 2022, section 4; Megatron-LM's fused qkv.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from bigbrain_fx.core import Graph, ModuleCall, Op, ParamRef, Ref, RewritePlace, TensorSpec
from bigbrain_fx.plan.rewriting.making import fresh, made_like, total
from bigbrain_fx.planning import mutated_roots

_LINEAR = "aten.linear.default"


def find(graph: Graph) -> Iterator[RewritePlace]:
    """Yield the places where several linear layers read one value."""
    written, readers = mutated_roots(graph), _readers(graph)
    groups: dict[object, list[Op]] = {}
    for op in graph.ops:
        if _is_layer(op) and not written & {op.refs[0], op.name, *op.params}:
            if all(readers[graph.param[name].canonical] == 1 for name in op.params):
                groups.setdefault(_likeness(graph, op), []).append(op)
    for ops in groups.values():
        if len(ops) > 1:
            yield _place(graph, ops)


def _readers(graph: Graph) -> dict[str, int]:
    """Return how many ops read each parameter: a weight with other uses stays a layer's own."""
    found = dict.fromkeys((param.canonical for param in graph.params), 0)
    for op in graph.ops:
        for name in op.params:
            found[graph.param[name].canonical] += 1
    return found


def _is_layer(op: Op) -> bool:
    """Whether an op is x W' + b of a value and the model's own tensors."""
    match op.args:
        case (Ref(), ParamRef()) | (Ref(), ParamRef(), None | ParamRef()):
            return op.target == _LINEAR and not op.kwargs
    return False


def _likeness(graph: Graph, op: Op) -> object:
    """Return what layers of one product have in common: who calls them, too."""
    specs = [graph.param[name].spec for name in op.params]
    kinds = tuple((spec.dtype, spec.requires_grad) for spec in specs)
    return op.refs[0], kinds, op.outputs[0].dtype, _callers(op)


def _callers(op: Op) -> tuple[ModuleCall, ...]:
    """Return the calls around a layer's own."""
    is_own = op.modules and op.params[0].startswith(f"{op.modules[-1].path}.")
    return op.modules[:-1] if is_own and len(op.modules) > 1 else op.modules


def _place(graph: Graph, ops: Sequence[Op]) -> RewritePlace:
    first, widths = ops[0], [int(graph.param[op.params[0]].spec.shape[0]) for op in ops]
    joined = [_joined(graph, ops, kind) for kind in range(len(first.params))]
    spec = _wide(first.outputs[0], sum(widths))
    own = [total(graph.param[name].spec.nbytes for name in op.params) for op in ops]
    product = made_like(
        first,
        fresh(graph, f"{first.name}_together"),
        _LINEAR,
        (first.args[0], *(Ref(op.name) for op in joined)),
        (spec,),
        modules=_callers(first),
        flops=total(op.flops for op in ops),
        reads_bytes=total((first.reads_bytes, *own[1:])),
        writes_bytes=total(op.writes_bytes for op in ops),
    )
    made = (*joined, product, *_parts(graph, product, ops, widths))
    names = tuple(op.name for op in ops)
    layers = tuple(op.params[0].rpartition(".")[0] for op in ops)
    alike = repr((widths, first.outputs[0], [graph.param[n].spec for n in first.params]))
    return RewritePlace("linears", names, first.name, made, layers, alike)


def _joined(graph: Graph, ops: Sequence[Op], kind: int) -> Op:
    """Return the op that joins weights (kind 0) or biases (1) row by row."""
    names = [op.params[kind] for op in ops]
    specs = [graph.param[name].spec for name in names]
    rows = sum(int(spec.shape[0]) for spec in specs)
    nbytes = sum(spec.nbytes for spec in specs)
    return made_like(
        ops[0],
        fresh(graph, f"{ops[0].name}_{('weights', 'biases')[kind]}"),
        "aten.cat.default",
        (tuple(ParamRef(name) for name in names),),
        (replace(specs[0], shape=(rows, *specs[0].shape[1:])),),
        modules=_callers(ops[0]),
        reads_bytes=nbytes,
        writes_bytes=nbytes,
    )


def _parts(graph: Graph, product: Op, ops: Sequence[Op], widths: Iterable[int]) -> Iterator[Op]:
    """Yield the ops that take the product apart; parts have the layers' names."""
    specs = [op.outputs[0] for op in ops]
    name = fresh(graph, f"{ops[0].name}_parts")
    args = (Ref(product.name), tuple(widths), -1)
    how = {"modules": product.modules}
    target = "aten.split_with_sizes.default"
    yield made_like(product, name, target, args, specs, view_of=product.name, **how)
    for place, (op, spec) in enumerate(zip(ops, specs, strict=True)):
        args = (Ref(name), place)
        yield made_like(op, op.name, "operator.getitem", args, (spec,), view_of=name, **how)


def _wide(spec: TensorSpec, width: int) -> TensorSpec:
    return replace(spec, shape=(*spec.shape[:-1], width))
