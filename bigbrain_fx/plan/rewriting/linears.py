"""Linear layers that read one value -> one product with their weights joined, and its parts.

    q, k, v = x @ Wq.T, x @ Wk.T, x @ Wv.T      becomes      q, k, v = split(x @ cat(Wq, Wk, Wv).T)

Weights are joined where they are used: parameters stay what they are, each with its own gradient.
Sources: Jia et al., TASO, SOSP 2019; Unger et al., Unity, OSDI 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bigbrain_fx.core import Graph, ModuleCall, Op, ParamRef, Ref, RewritePlace, TensorSpec, plus
from bigbrain_fx.plan.rewriting.making import fresh, made_like
from bigbrain_fx.planning import mutated_roots

_LINEAR = "aten.linear.default"
_KINDS = ("weights", "biases")


def find(graph: Graph) -> Iterator[RewritePlace]:
    """Yield the places where several linear layers read one value."""
    written, readers = mutated_roots(graph), _readers(graph)
    groups: dict[object, list[Op]] = {}
    for op in graph.ops:
        is_free = _is_layer(op) and not written & {op.refs[0], op.name, *op.params}
        if is_free and all(readers[graph.param[name].canonical] == 1 for name in op.params):
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
    is_own = len(op.modules) > 1 and op.params[0].startswith(f"{op.modules[-1].path}.")
    return op.modules[:-1] if is_own else op.modules


def _place(graph: Graph, ops: Sequence[Op]) -> RewritePlace:
    first, specs = ops[0], [graph.param[op.params[0]].spec for op in ops]
    widths = tuple(int(spec.shape[0]) for spec in specs)
    joined = [_joined(graph, ops, kind) for kind in range(len(first.params))]
    product = _product(graph, ops, joined, sum(widths))
    names = tuple(op.name for op in ops)
    layers = tuple(op.params[0].rpartition(".")[0] for op in ops)
    made = (*joined, product, *_parts(graph, product, ops, widths))
    alike = repr((widths, len(joined), first.outputs[0], specs))
    return RewritePlace("linears", names, first.name, made, layers, alike)


def _joined(graph: Graph, ops: Sequence[Op], kind: int) -> Op:
    """Return the op that joins weights (kind 0) or biases (1) row by row."""
    names = [op.params[kind] for op in ops]
    specs = [graph.param[name].spec for name in names]
    rows = sum(int(spec.shape[0]) for spec in specs)
    spec = replace(specs[0], shape=(rows, *specs[0].shape[1:]))
    return made_like(
        ops[0],
        fresh(graph, f"{ops[0].name}_{_KINDS[kind]}"),
        "aten.cat.default",
        (tuple(ParamRef(name) for name in names),),
        (spec,),
        modules=_callers(ops[0]),
        moves=spec,
    )


def _product(graph: Graph, ops: Sequence[Op], joined: Sequence[Op], width: int) -> Op:
    """Return the one product; it costs what the layers cost, and reads their input once."""
    first = ops[0]
    others = [graph.param[name].spec.nbytes for op in ops[1:] for name in op.params]
    args = (first.args[0], *(Ref(op.name) for op in joined))
    spec = first.outputs[0]
    wide = replace(spec, shape=(*spec.shape[:-1], width))
    name, around = fresh(graph, f"{first.name}_together"), _callers(first)
    made = made_like(first, name, _LINEAR, args, (wide,), modules=around)
    return replace(
        made,
        flops=plus(*(op.flops for op in ops)),
        reads_bytes=plus(first.reads_bytes, *others),
        writes_bytes=plus(*(op.writes_bytes for op in ops)),
    )


def _parts(graph: Graph, product: Op, ops: Sequence[Op], widths: tuple[int, ...]) -> Iterator[Op]:
    """Yield the ops that take the product apart; parts have the layers' names."""
    specs: list[TensorSpec] = [op.outputs[0] for op in ops]
    around, name = product.modules, fresh(graph, f"{ops[0].name}_parts")
    given, target = (Ref(product.name), widths, -1), "aten.split_with_sizes.default"
    yield made_like(product, name, target, given, specs, modules=around, view_of=product.name)
    for place, (op, spec) in enumerate(zip(ops, specs, strict=True)):
        part, target = (Ref(name), place), "operator.getitem"
        yield made_like(op, op.name, target, part, (spec,), modules=around, view_of=name)
