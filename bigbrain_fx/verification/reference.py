"""The one-process reference: what a bundle must compute, run without any of the bundle's stages.

The captured graph runs whole, in the order of the plan, under one autograd graph. It differs from
plain training in two ways only. A parameter is a leaf of its own in every stage that reads it, and
the leaves' gradients are added last stage first. Where there are replicas, gradients of
micro-batches are added in the plan's order of sums. That fixes the grouping of sums, so that
equality can be bitwise. Of tensor groups all ranks run, op by op, in lockstep; sums over them are
added in rank order. Without groups the model is the one rank. This file knows nothing of emitted
text or of messages, and shares no sum with the runtime. Beside the user's loop it draws the random
numbers that the loop has drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import ROW_COUNTS, Dim, Graph, Op, Ref, Shard, Stages
from bigbrain_fx.frontend import (
    apart_from_here,
    draw_places,
    place_name,
    run_graph,
    run_members,
    taken,
)
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification import plain_batches
from bigbrain_fx.verification.draws import (
    LOOP,
    Key,
    States,
    reseed,
    set_states,
    states as generator_states,
)
from bigbrain_fx.weights import part_name

Leaf = tuple[str, int]  # a parameter, and which of the stages that give it a gradient
Gradients = dict[Leaf, Tensor]
Tensors = Mapping[str, Tensor]
Draws = Callable[[Op], AbstractContextManager[None]]
Watch = Callable[[Op, object], None]
SIZE = "aten.sym_size.int"


def weights_of(graph: Graph, micro_inputs: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Return by what each micro-batch weighs: its count of the loss's elements, else its rows."""
    if ROW_COUNTS in micro_inputs[0]:
        return [float(made[ROW_COUNTS].sum()) for made in micro_inputs]
    return [float(rows) for rows in rows_of(graph, micro_inputs)]


def rows_of(graph: Graph, micro_inputs: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Return the rows of each micro-batch; where nothing has rows, all weigh the same."""
    named = next((e.name for e in graph.inputs if e.batched), None)
    named = named if named in micro_inputs[0] else None
    return [1 if named is None else made[named].shape[0] for made in micro_inputs]


def with_known_sizes(graph: Graph) -> Graph:
    """Return a graph that reads sizes of the inputs that have them.

    A stage reads them of any tensor that it has: it may run before the one that the op names.
    """
    places: dict[Dim, tuple[str, int]] = {
        size: (entry.name, dim)
        for entry in reversed(graph.inputs)
        for dim, size in reversed([*enumerate(entry.spec.shape)])
        if isinstance(size, str)
    }

    def known(op: Op) -> Op:
        if op.target != SIZE or not isinstance(op.args[1], int):
            return op
        name = op.refs[0]
        spec = graph.input[name].spec if name in graph.input else graph.op[name].outputs[0]
        place = places.get(spec.shape[op.args[1]])
        return op if place is None else replace(op, args=(Ref(place[0]), place[1]))

    return replace(graph, ops=tuple(map(known, graph.ops)))


@dataclass(frozen=True)
class ReplicaOrder:
    """How one replica runs the graph: its ops in order, and the stage of each."""

    order: list[str]
    stage_of: Mapping[str, int]
    micros: tuple[int, ...]

    @staticmethod
    def of(stages: Stages, replica: int) -> ReplicaOrder:
        """Return how a replica runs; of tensor groups, give the stages of one rank."""
        own = stages.of_replica(replica)
        order = list(dict.fromkeys(name for stage in own for name in stage.ops))
        stage_of = {
            name: stage.index
            for stage in reversed(own)
            for name in stage.ops
            if name not in stage.recomputed
        }
        return ReplicaOrder(order, stage_of, stages.micros[replica] if stages.micros else ())


def by_place(given: Gradients) -> Gradients:
    """Name leaves by their place among the parameter's: replicas number their stages otherwise."""
    stages: dict[str, list[int]] = {}
    for name, stage in sorted(given, key=lambda leaf: leaf[1]):
        stages.setdefault(name, []).append(stage)
    return {(name, stages[name].index(stage)): g for (name, stage), g in given.items()}


def _added(parts: Iterable[Gradients]) -> Gradients:
    """Add from the left."""
    sums: Gradients = {}
    for part in parts:
        for leaf, gradient in part.items():
            sums[leaf] = sums[leaf] + gradient if leaf in sums else gradient
    return sums


def _tree(first: int, size: int, made: Callable[[int], Gradients]) -> Gradients:
    """Add `size` micro-batches, a power of two, as a binary tree."""
    if size == 1:
        return made(first)
    half = size // 2
    return _added((_tree(first, half, made), _tree(first + half, half, made)))


def summed(stages: Stages, count: int, made: Callable[[int], Gradients]) -> Gradients:
    """Add the gradients of micro-batches in the plan's order; without replicas, ascending."""
    own_first = stages.sum_order in ("replica", "backend") and not stages.sums_each
    if stages.micros and own_first:
        return _by_replica([[m for m in own if m < count] for own in stages.micros], made)
    if stages.sum_order == "tree":
        return _added(_tree(first, size, made) for first, size in _powers(count))
    return ascending(count, made)


def _by_replica(micros: Sequence[Sequence[int]], made: Callable[[int], Gradients]) -> Gradients:
    """Add each replica's own, then the replicas'; all are made by number, as forwards may write."""
    total: Gradients = {}
    sums: list[Gradients] = [{} for _ in micros]
    whose = {micro: replica for replica, own in enumerate(micros) for micro in own}
    left = [*range(len(micros))]
    for micro in sorted(whose):
        sums[whose[micro]] = _added((sums[whose[micro]], made(micro)))
        while left and max(micros[left[0]], default=-1) <= micro:  # no more is kept than waits
            total = _added((total, sums[left.pop(0)]))
    return total


def ascending(count: int, made: Callable[[int], Gradients]) -> Gradients:
    """Add the gradients of micro-batches as plain accumulation does."""
    return _added(map(made, range(count)))


def _powers(count: int) -> Iterator[tuple[int, int]]:
    """Yield the trees that hold `count` micro-batches, the largest first: 7 is 4 + 2 + 1."""
    first = 0
    while first < count:
        size = 1 << ((count - first).bit_length() - 1)
        yield first, size
        first += size


def keyed(graph: Graph, key: Key) -> Draws:
    """Return what seeds each op of a graph that draws, by its place in the model."""
    places = draw_places(graph)

    @contextmanager
    def seeded(op: Op) -> Iterator[None]:
        reseed(key, place_name(*places[op.name]))
        yield

    return seeded


def _as_autograd_lays(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of a gradient as autograd leaves it in `.grad`: a norm adds in that order."""
    leaf = parameter.detach().requires_grad_()
    leaf.backward(gradient.clone())
    assert leaf.grad is not None
    return leaf.grad


class _Members:
    """The ranks of all tensor groups in one process; the one model where there are no groups.

    Args:
        graphs: of each rank.
        stages: of the plan.
        shards: what ranks have of divided parameters.
        tensors: of the model, whole, by name.
        functions: as in `run_graph`.
        leaves_per_stage: off, every parameter has one leaf on each rank, as in plain training.

    Attributes:
        watch: of one rank: called with each op and its value.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        stages: Stages,
        shards: Sequence[Shard],
        tensors: Tensors,
        functions: Mapping[str, object],
        leaves_per_stage: bool,
    ) -> None:
        self.graphs, self.stages = graphs, stages
        self.functions = apart_from_here(functions)
        self.watch: Watch | None = None
        self.leaves_per_stage = leaves_per_stage
        self.shards = {(shard.param, shard.member): shard for shard in shards}
        self.places = draw_places(graphs[0])
        self.runs = [with_known_sizes(graph) for graph in graphs]
        own = replace(stages, stages=stages.of_member(0))
        self.cuts = [ReplicaOrder.of(own, number) for number in range(own.replicas)]
        held = [
            {n: self._part(n, member, t) for n, t in tensors.items()}
            for member in range(len(graphs))
        ]
        self.trained = [self._trained(member, own) for member, own in enumerate(held)]
        self.fixed = [
            {p.name: own[p.name] for p in graph.params if p.canonical not in trained}
            for graph, own, trained in zip(graphs, held, self.trained, strict=True)
        ]

    def _part(self, name: str, member: int, tensor: Tensor) -> Tensor:
        shard = self.shards.get((name, member))
        if shard is None:
            return tensor.detach().clone()
        return taken(tensor, shard).detach().clone(memory_format=torch.contiguous_format)

    def _trained(self, member: int, held: Tensors) -> dict[str, nn.Parameter]:
        param = self.graphs[member].param
        stages = self.stages.of_member(member)
        used = {param[name].canonical for stage in stages for name in stage.params}
        wants = {p.canonical for p in self.graphs[member].params if p.spec.requires_grad} & used
        return {
            p.name: nn.Parameter(held[p.name])
            for p in self.graphs[member].params
            if p.name in wants
        }

    def stored(self, name: str, member: int) -> str:
        """Return the name under which a rank's tensor is kept."""
        return part_name(name, member) if (name, member) in self.shards else name

    def seeded(self, _inputs: Tensors, key: Key) -> Draws:
        """Return what seeds each op that draws: by its place, as a bundle does."""
        return keyed(self.graphs[0], key)

    def weight(self, member: int, name: str, _stage: int) -> Tensor:
        """Return the numbers of a parameter that a stage computes with."""
        return self.trained[member][name]

    def of_each(
        self, batches: Sequence[Tensors], seed: int, step: int, scale: float = 1.0
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Return the mean loss of a step's micro-batches, and each rank's gradients.

        Gradients are those of the loss times `scale`. See `weights_of` for the mean.
        """
        losses: dict[int, Tensor] = {}
        weights = weights_of(self.graphs[0], batches)

        def made(micro: int) -> Gradients:
            share = partial(plain_batches.share, weights=weights, micro=micro)
            key = seed, step, micro
            losses[micro], found = self.of_micro_batch(batches[micro], key, share, scale)
            return {
                (part_name(name, member), place): gradient
                for member, own in enumerate(found)
                for (name, place), gradient in own.items()
            }

        sum_all = partial(summed, self.stages) if self.leaves_per_stage else ascending
        sums = sum_all(len(batches), made)
        loss = plain_batches.mean([losses[micro] for micro in sorted(losses)], weights)
        totals: dict[str, Tensor] = {}
        for name, place in sorted(sums, key=lambda leaf: -leaf[1]):
            part = sums[name, place]
            totals[name] = totals[name] + part if name in totals else part
        return loss, [self._laid(member, totals) for member in range(len(self.graphs))]

    def _laid(self, member: int, totals: Tensors) -> dict[str, Tensor]:
        own = {name: (p, part_name(name, member)) for name, p in self.trained[member].items()}
        return {n: _as_autograd_lays(totals[at], p) for n, (p, at) in own.items() if at in totals}

    def of_micro_batch(
        self, inputs: Tensors, key: Key, share: Callable[[Tensor], Tensor], scale: float
    ) -> tuple[Tensor, list[Gradients]]:
        """Return the loss of a micro-batch, and what each rank's leaves get of `share` of it."""
        leaves: list[dict[Leaf, Tensor]] = [{} for _ in self.graphs]
        cut = next((each for each in self.cuts if key[2] in each.micros), self.cuts[0])
        losses = self._losses(inputs, key, cut, leaves)
        flat = [leaf for own in leaves for leaf in own.values()]
        seeds = [share(torch.full_like(loss, scale)) for loss in losses]
        made = torch.autograd.grad(losses, flat, seeds, allow_unused=True)
        found: Iterator[Tensor | None] = iter(made)
        each = [{leaf: g for leaf in part if (g := next(found)) is not None} for part in leaves]
        return losses[0].detach(), [by_place(own) for own in each]

    def _losses(
        self, inputs: Tensors, key: Key, cut: ReplicaOrder, leaves: list[dict[Leaf, Tensor]]
    ) -> list[Tensor]:
        given = [partial(self._leaf, own, m, cut) for m, own in enumerate(leaves)]
        name = self.graphs[0].loss
        assert name is not None
        how = {
            "order": cut.order,
            "key": self.seeded(inputs, key),
            "values": [name],
            "functions": self.functions,
        }
        if len(self.graphs) == 1:
            how |= {"leaf": given[0], "watch": self.watch}
            found = [run_graph(self.runs[0], self.fixed[0], inputs, **how)]  # type: ignore[arg-type]
        else:
            same = [inputs for _ in self.graphs]
            found = run_members(self.runs, self.fixed, same, leaves=given, **how)  # type: ignore[arg-type]
        return [cast("Tensor", values[name]) for values in found]

    def _leaf(
        self, leaves: dict[Leaf, Tensor], member: int, cut: ReplicaOrder, param: str, op: str
    ) -> Tensor:
        canonical = self.graphs[member].param[param].canonical
        if canonical not in self.trained[member]:
            return self.fixed[member][param]
        place = canonical, cut.stage_of.get(op, 0) if self.leaves_per_stage else 0
        if place not in leaves:
            leaves[place] = self.weight(member, *place).detach().requires_grad_()
        return leaves[place]


class Reference(_Members):
    """The model in one process, not divided; its arguments are those of the graph."""

    def __init__(
        self,
        graph: Graph,
        stages: Stages,
        tensors: Tensors,
        functions: Mapping[str, object],
        leaves_per_stage: bool = True,
    ) -> None:
        super().__init__((graph,), stages, (), tensors, functions, leaves_per_stage)
        self.graph, self.tensors = graph, tensors
        self.parameters, self.buffers = self.trained[0], self.fixed[0]

    def gradients(
        self, batches: Sequence[Tensors], seed: int, step: int, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a step's micro-batches and the gradient of every parameter."""
        loss, (found,) = self.of_each(batches, seed, step, scale)
        return loss, found


class MembersReference(_Members):
    """The ranks of a plan with tensor groups, in lockstep."""

    def __init__(
        self,
        plan: Plan,
        tensors: Tensors,
        functions: Mapping[str, object],
        *,
        leaves_per_stage: bool = True,
    ) -> None:
        about = plan.sharded.members, plan.stages, plan.sharded.shards
        super().__init__(*about, tensors, functions, leaves_per_stage)


class LoopReference(Reference):
    """A reference with one leaf a parameter, as plain training has; its arguments are those."""

    def __init__(
        self, graph: Graph, stages: Stages, tensors: Tensors, functions: Mapping[str, object]
    ) -> None:
        super().__init__(graph, stages, tensors, functions, leaves_per_stage=False)

    def seeded(self, inputs: Tensors, key: Key) -> Draws:
        """Seed as the loop does; return what puts the generator where an op finds it there."""
        traced = [op.name for op in self.graph.ops if op.random]
        orders = ([name for name in cut.order if name in traced] for cut in self.cuts)
        states = {} if all(order == traced for order in orders) else self._states(inputs, key)
        reseed(key, LOOP)

        @contextmanager
        def placed(op: Op) -> Iterator[None]:
            if states:
                set_states(states[op.name])
            yield

        return placed

    def _states(self, inputs: Tensors, key: Key) -> dict[str, States]:
        """Return the generators' states before each op that draws, in the order of the trace."""
        states: dict[str, States] = {}
        fixed = {name: tensor.clone() for name, tensor in self.buffers.items()}

        def leaf(param: str, _op: str) -> Tensor:
            canonical = self.graph.param[param].canonical
            own = self.parameters.get(canonical)
            return fixed[param] if own is None else own.detach().requires_grad_()

        @contextmanager
        def noted(op: Op) -> Iterator[None]:
            states[op.name] = generator_states()
            yield

        reseed(key, LOOP)
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        run_graph(self.graph, fixed, given, leaf=leaf, key=noted, functions=self.functions)
        return states
