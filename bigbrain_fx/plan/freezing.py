"""A graph some of whose modules train no more: what only they have led to wants no gradient either.

What comes out is the graph that capture gives of the model with `requires_grad_(False)` on them, so
that a cut leaves their backward passes, gradients and optimizer state out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from bigbrain_fx.core import Graph, Op, Param
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.by_hand import named_paths


def with_frozen(graph: Graph, modules: Sequence[str], at: str = "--freeze") -> Graph:
    """Return a graph whose parameters in some modules are frozen; a tied one under all its names.

    Args:
        graph: of a training.
        modules: their names, as "blocks.0-5"; also names of parameters.
        at: what the user has typed.

    Raises:
        InputError: there is no such module, it trains nothing, or nothing is left to train.
    """
    trained = [p for p in graph.params if p.is_trained]
    chosen: set[str] = set()
    for name in modules:
        found = _inside(name, graph, trained, at)
        if not found:
            raise InputError(
                f"nothing of '{name}' is trained",
                code="BX1236",
                at=at,
                help="leave it out: it is frozen already",
            )
        chosen |= found
    if chosen == {p.canonical for p in trained}:
        raise InputError(
            "nothing is left to train",
            code="BX1237",
            at=at,
            help="leave a module out that is to be trained",
        )
    params = tuple(_frozen(p) if p.canonical in chosen else p for p in graph.params)
    made = replace(graph, params=params, ops=_regraded(graph, chosen))
    if made.loss is not None and not made.op[made.loss].requires_grad:
        raise InputError(
            "the loss has no gradient then: what is left to train does not reach it",
            code="BX1238",
            at=at,
            help="leave a module out that the loss is made of",
        )
    return made


def _inside(name: str, graph: Graph, trained: Sequence[Param], at: str) -> set[str]:
    own = [p.name for p in graph.params if p.kind == "parameter"]
    known = tuple(dict.fromkeys(path for full in own for path in (*_around(full), full)))
    paths = named_paths(name, known, at)
    return {p.canonical for p in trained for path in paths if f"{p.name}.".startswith(f"{path}.")}


def _around(full: str) -> Iterable[str]:
    parts = full.split(".")[:-1]
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _frozen(param: Param) -> Param:
    return replace(param, spec=replace(param.spec, requires_grad=False))


def _regraded(graph: Graph, chosen: Collection[str]) -> tuple[Op, ...]:
    """Return the ops; those that only frozen parameters gave a gradient have none.

    Of a value that is written into, and of its views, all keep one when one of them does.
    """
    gone = {p.name for p in graph.params if p.canonical in chosen}
    wants = {p.name for p in graph.params if p.spec.requires_grad} - gone
    wants |= {entry.name for entry in graph.inputs if entry.spec.requires_grad}
    root = _roots(graph.ops)
    before = -1
    while before < len(wants):  # a later write may give a gradient to what was made earlier
        before = len(wants)
        for op in graph.ops:
            if op.requires_grad and _is_given(op, wants, gone, graph):
                wants |= {op.name, *(root.get(name, name) for name in op.mutates)}
            if root[op.name] in wants and op.requires_grad:
                wants.add(op.name)
    return tuple(op if op.name in wants or not op.requires_grad else _flat(op) for op in graph.ops)


def _is_given(op: Op, wants: Collection[str], gone: Collection[str], graph: Graph) -> bool:
    """Whether an op still has a gradient: through what it reads, or as it made one by itself."""
    reads = (*op.refs, *op.params)
    if any(name in wants for name in reads):
        return True
    had = any(name in gone or (name in graph.op and graph.op[name].requires_grad) for name in reads)
    return not had


def _roots(ops: Iterable[Op]) -> dict[str, str]:
    root: dict[str, str] = {}
    for op in ops:
        root[op.name] = root.get(op.view_of, op.view_of) if op.view_of else op.name
    return root


def _flat(op: Op) -> Op:
    outputs = tuple(replace(spec, requires_grad=False) for spec in op.outputs)
    return replace(op, outputs=outputs)
