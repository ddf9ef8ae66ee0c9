"""The one-process reference: what a bundle must compute, run without any of the bundle's stages.

The captured graph runs whole, in the order of the plan, under one autograd graph. It differs from
plain training in two ways only: a parameter is a leaf of its own in every stage that reads it, and
the leaves' gradients are added last stage first; and where there are replicas, gradients of
micro-batches are added in the plan's order of sums. That fixes the grouping of sums, so that
equality can be bitwise. This room knows nothing of emitted text or of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.core import ROW_COUNTS, Dim, Graph, Op, Ref, Stages
from bigbrain_fx.frontend import draw_places, place_name, run_graph
from bigbrain_fx.runtime import (
    Training,
    are_finite,
    clipped,
    laid_out,
    mean_loss,
    norm,
    reseed,
    share_of,
)
from bigbrain_fx.verification.stepping import Stepper

Key = tuple[int, int, int]  # seed, step, micro-batch
Leaf = tuple[str, int]  # a parameter, and which of the stages that give it a gradient
Gradients = dict[Leaf, Tensor]
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
class Trace:
    """What a training run leaves behind, by names of the model."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)  # held by several devices, with other numbers
    left_out: set[int] = field(default_factory=set)  # steps that a loss scale kept from updating

    def take(self, into: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """Take what one device has; note what another has otherwise."""
        for name, tensor in found.items():
            if name in into and not _same_bits(into[name], tensor):
                self.unlike.add(name)
            into[name] = tensor


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


@dataclass(frozen=True)
class ReplicaOrder:
    """How one replica runs the graph: its ops in order, and the stage of each."""

    order: list[str]
    stage_of: Mapping[str, int]
    micros: tuple[int, ...]

    @staticmethod
    def of(stages: Stages, replica: int) -> ReplicaOrder:
        """Return how a replica runs; of tensor groups, give the stages of one member."""
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


@dataclass
class Reference:
    """The model in one process.

    Attributes:
        leaves_per_stage: off, every parameter has one leaf, as in plain training.
    """

    graph: Graph
    stages: Stages
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, object]
    leaves_per_stage: bool = True

    def __post_init__(self) -> None:
        self.places = draw_places(self.graph)
        self.runs = with_known_sizes(self.graph)
        self.cuts = [ReplicaOrder.of(self.stages, number) for number in range(self.stages.replicas)]
        wants = {p.canonical for p in self.graph.params if p.spec.requires_grad}
        used = {
            self.graph.param[name].canonical
            for stage in self.stages.stages
            for name in stage.params
        }
        self.parameters = {
            p.name: nn.Parameter(self.tensors[p.name].detach().clone())
            for p in self.graph.params
            if p.name in wants and p.name in used
        }
        self.buffers = {
            p.name: self.tensors[p.name].detach().clone()
            for p in self.graph.params
            if p.canonical not in self.parameters
        }

    def gradients(
        self, micro_inputs: list[Mapping[str, Tensor]], seed: int, step: int, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a step's micro-batches and the gradient of every parameter.

        Gradients are those of the loss times `scale`. See `weights_of` for the mean.
        """
        losses: dict[int, Tensor] = {}
        weights = weights_of(self.graph, micro_inputs)

        def made(micro: int) -> Gradients:
            key, share = (seed, step, micro), partial(share_of, weights=weights, micro=micro)
            losses[micro], found = self._micro_batch(micro_inputs[micro], key, share, scale)
            return found

        sum_all = partial(summed, self.stages) if self.leaves_per_stage else ascending
        sums = sum_all(len(micro_inputs), made)
        totals: dict[str, Tensor] = {}
        for name, place in sorted(sums, key=lambda key: -key[1]):
            part = sums[name, place]
            totals[name] = totals[name] + part if name in totals else part
        loss = mean_loss([losses[micro] for micro in sorted(losses)], weights)
        known = {n: p for n, p in self.parameters.items() if n in totals}
        return loss, {name: laid_out(totals[name].clone(), p) for name, p in known.items()}

    def weight(self, name: str, stage: int) -> Tensor:
        """Return the numbers of a parameter that a stage computes with."""
        return self.parameters[name]

    def _micro_batch(
        self,
        inputs: Mapping[str, Tensor],
        key: Key,
        share: Callable[[Tensor], Tensor],
        scale: float,
    ) -> tuple[Tensor, Gradients]:
        leaves: dict[Leaf, Tensor] = {}
        cut = next((c for c in self.cuts if key[2] in c.micros), self.cuts[0])

        def leaf(param: str, op: str) -> Tensor:
            canonical = self.graph.param[param].canonical
            if canonical not in self.parameters:
                return self.buffers[param]
            place = canonical, cut.stage_of.get(op, 0) if self.leaves_per_stage else 0
            if place not in leaves:
                leaves[place] = self.weight(*place).detach().requires_grad_()
            return leaves[place]

        assert self.graph.loss is not None
        found = run_graph(
            self.runs,
            self.buffers,
            inputs,
            order=cut.order,
            leaf=leaf,
            key=lambda op: self._keyed(op, key),
            values=[self.graph.loss],
            functions=self.functions,
        )
        loss = found[self.graph.loss]
        assert isinstance(loss, Tensor)
        seed = share(torch.full_like(loss, scale))
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(leaves.values()), seed, allow_unused=True
        )
        pairs = zip(leaves, gradients, strict=True)
        given = {leaf: gradient for leaf, gradient in pairs if gradient is not None}
        return loss.detach(), by_place(given)

    @contextmanager
    def _keyed(self, op: Op, key: Key) -> Iterator[None]:
        reseed(key, place_name(*self.places[op.name]), torch.device("cpu"))
        yield


def train_reference(
    reference: Reference,
    batches: Callable[[int], list[Mapping[str, Tensor]]],
    training: Training,
    steps: int,
    seed: int,
) -> Trace:
    """Train in one process, by torch's own loss scale and schedulers."""
    loop = _Loop(reference, training)
    for step in range(steps):
        loop.run(step, batches(step), seed)
    loop.trace.tensors.update({name: p.detach() for name, p in reference.parameters.items()})
    loop.trace.tensors.update(reference.buffers)
    return loop.trace


class _Loop:
    """A reference with its optimizer."""

    def __init__(self, reference: Reference, training: Training) -> None:
        self.reference, self.training, self.trace = reference, training, Trace()
        self.updates = Stepper(training, reference.parameters)
        scaling: Any = getattr(training, "grad_scaler", None) or {"enabled": False}
        self.scaler = torch.amp.GradScaler("cpu", **scaling)

    def run(self, step: int, batches: list[Mapping[str, Tensor]], seed: int) -> None:
        self.scaler.scale(torch.zeros(()))  # it makes its scale with the first
        found = self.reference.gradients(batches, seed, step, self.scaler.get_scale())
        loss, gradients = found
        self.trace.losses.append(loss.double())  # a bundle tells its loss as a number
        self.updates.give(gradients)
        self._clip()
        if self.scaler.is_enabled() and not are_finite(gradients.values()):
            self.trace.left_out.add(step)
        elif step == 0:  # an optimizer may write into them: a bundle's are looked at after it
            self.trace.gradients.update(self.updates.given)
        self._update(step)

    def _clip(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.updates.optimizer)
        limit, every = self.training.clip_norm, self.updates.parameters
        if limit is None:
            return
        if len({parameter.dtype for parameter in every.values()}) == 1:
            torch.nn.utils.clip_grad_norm_([*every.values()], limit)
            return
        # of several types torch adds norms type by type, in an order of a hash table's
        given = self.updates.given
        norms = [norm(given.get(name), parameter) for name, parameter in every.items()]
        self.updates.give(clipped(given, norms, limit))

    def _update(self, step: int) -> None:
        self.updates.set_rate(step)
        self.scaler.step(self.updates.optimizer)
        self.scaler.update()
        self.updates.end()
