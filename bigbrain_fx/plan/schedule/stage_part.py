"""One stage of a concrete graph on its own device: what its ops hold there.

It knows storages only: a view is its base; and it follows `Op.saves`, which capture measured. Of
what runs when it knows nothing: that is `walk`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bigbrain_fx.core import Costs, Dim, Edge, EdgeKind, Graph, ModuleCall, Op, Saves, Stage, Stages
from bigbrain_fx.plan.offloading import STORED_FROM_BYTES
from bigbrain_fx.plan.schedule.cuda import rounded

_REMEMBERED = "_walk"  # as a cached property is: a graph is frozen, and every stage asks


@dataclass(frozen=True)
class Part:
    """One stage of a concrete graph, on its own device."""

    graph: Graph
    stages: Stages
    stage: Stage
    costs: Costs

    @property
    def kind(self) -> str:
        """The kind of its device."""
        return self.costs.cluster.device[self.stage.device].kind

    def rounded(self, nbytes: Dim) -> int:
        """Return what the device's allocator takes for so many bytes."""
        return rounded(_int(nbytes), self.kind)

    def ops(self) -> Iterator[Op]:
        """Yield its ops, in order."""
        return (self.graph.op[name] for name in self.stage.ops)

    def saves(self, op: Op) -> Saves:
        """Return what an op holds here; by the estimator's rule where nobody has measured it."""
        if op.saves is not None:
            return op.saves if self.kind == "cpu" else _on_cuda(self.graph, op, op.saves)
        if op.view_of is not None or not (op.outputs or op.mutates):
            return Saves(passed=(0,))
        cost = self.costs.op_cost(op.name, self.stage.device)
        return Saves(
            (), cost.saved_bytes, _int(op.writes_bytes) + cost.saved_bytes, cost.workspace_bytes
        )

    @property
    def stores(self) -> bool:
        """Whether what its forward saves lies in its device's store."""
        return self.stage.index in self.stages.saving and not self.stage.runs_again

    def stored(self, op: Op) -> Mapping[str, int]:
        """Return the bytes that an op's backward asks of the store, by the storage's value.

        What is not made here is held anyway; what an op saves besides has the op's name and "!".
        """
        saves, roots = self.saves(op), roots_of(self.graph)
        kept = (roots.get(name, name) for name in places(op, saves))
        made = {root: self.result_bytes(self.graph.op[root]) for root in kept if root in self.own}
        made[f"{op.name}!"] = self.rounded(saves.own_bytes)
        return {name: nbytes for name, nbytes in made.items() if nbytes >= STORED_FROM_BYTES}

    @cached_property
    def own(self) -> frozenset[str]:
        """The names of its ops."""
        return frozenset(self.stage.ops)

    def result_bytes(self, op: Op) -> int:
        """Return the bytes of an op's fresh results."""
        return sum(self.rounded(spec.nbytes) for spec in op.outputs)

    def edges(self, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return what it sends of a kind."""
        return self.stages.out_of(self.stage.index, kind)

    def is_graded(self, op: Op) -> bool:
        """Whether the backward runs it."""
        return op.name in self.graph.graded


def trained_params(graph: Graph, stage: Stage) -> Mapping[str, int]:
    """Return the bytes of each parameter of a stage that wants a gradient, by canonical name."""
    found = (graph.param[name] for name in stage.params)
    return {param.canonical: param.spec.nbytes for param in found if param.is_trained}


def _int(size: object) -> int:
    assert isinstance(size, int), "costs are added up over a concrete graph, graph.at(rows)"
    return size


def _on_cuda(graph: Graph, op: Op, measured: Saves) -> Saves:
    """Return what CUDA's kernels hold, where the rule says that they keep other things."""
    if measured.cuda_own_bytes is None:
        return measured
    own = _int(measured.cuda_own_bytes)
    values = measured.values if measured.cuda_values is None else measured.cuda_values
    result = sum(spec.nbytes for spec in op.outputs)
    known = (graph.op[ref] for ref in op.refs if ref in graph.op)
    back = sum(spec.nbytes for reads in known for spec in reads.outputs if spec.requires_grad)
    return Saves(values, own, own + result, back, measured.passed)


def of_graph(graph: Graph) -> tuple[Mapping[str, str], Mapping[ModuleCall, int]]:
    """Return the storage of every value, and how many ops every call has: once for all stages."""
    known = graph.__dict__.get(_REMEMBERED)
    if known is None:
        root: dict[str, str] = {}
        for op in graph.ops:
            base = op.storage_of
            root[op.name] = op.name if base is None else root.get(base, base)
        known = root, Counter(call for op in graph.ops for call in op.modules)
        graph.__dict__[_REMEMBERED] = known
    found: tuple[Mapping[str, str], Mapping[ModuleCall, int]] = known
    return found


def roots_of(graph: Graph) -> Mapping[str, str]:
    """Return the value whose storage each op's result is: its own, but for views."""
    return of_graph(graph)[0]


def places(op: Op, saves: Saves) -> Iterator[str]:
    """Name the values that an op keeps."""
    refs = op.refs
    return (refs[place] if place >= 0 else op.name for place in saves.values)


# --------------------------------------------------------- gradients that are parts of a larger one


def wholes(graph: Graph, stages: Stages, edges: Iterable[Edge]) -> Iterator[tuple[Edge, int]]:
    """Yield the edges of gradients that no message copies, each a part that keeps the whole.

    The whole counts once for all parts, of which `edges` have those of a stage together.
    So the first of several that are parts of one has what the others leave of it.
    """
    parts: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        is_local = stages.stages[edge.source].device == stages.stages[edge.target].device
        whole = divided(graph, stages, edge) if edge.kind == "gradient" and is_local else None
        if whole is not None:
            parts.setdefault((whole.name, edge.source), []).append(edge)
    for (name, _), alike in parts.items():
        others = sum(edge.nbytes for edge in alike[1:])
        yield alike[0], _int(graph.op[name].outputs[0].nbytes) - others


def divided(graph: Graph, stages: Stages, edge: Edge) -> Op | None:
    """Return the only reader of a gradient's value whose gradient it is a part of, as of `cat`."""
    here = set(stages.stages[edge.source].ops) & graph.graded
    readers = [graph.op[name] for name in graph.consumers[edge.value] if name in here]
    if len(readers) != 1 or readers[0].saves is None:
        return None
    whole, part = readers[0].outputs[0], graph.op[edge.value].outputs[0]
    passed = readers[0].refs.index(edge.value) in readers[0].saves.passed
    larger = len(whole.shape) == len(part.shape) and whole.numel > part.numel
    return readers[0] if passed and larger else None
