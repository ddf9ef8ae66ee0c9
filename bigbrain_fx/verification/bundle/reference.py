"""The one-process reference: what a bundle must compute, run without any of the bundle's stages.

The captured graph runs whole, in the order of the plan, under one autograd graph. It differs from
plain training in one way only: a parameter is a leaf of its own in every stage that reads it, and
the leaves' gradients are added last stage first. That fixes the grouping of sums, so that equality
can be bitwise. This room knows nothing of emitted text or of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bigbrain_fx.capture.interpret import run_graph
from bigbrain_fx.core import Graph, Op, Stages
from bigbrain_fx.randomness import draw_places, place_name
from bigbrain_fx.runtime.modules import reseed

Key = tuple[int, int, int]  # seed, step, micro-batch


@dataclass(frozen=True)
class Trace:
    """What a training run leaves behind, by names of the model."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


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
        self.order = list(dict.fromkeys(name for stage in self.stages.stages for name in stage.ops))
        self.stage_of = {
            name: stage.index
            for stage in reversed(self.stages.stages)
            for name in stage.ops
            if name not in stage.recomputed
        }
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
        self, micro_inputs: list[Mapping[str, Tensor]], seed: int, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a step's micro-batches and the gradient of every parameter."""
        sums: dict[tuple[str, int], Tensor] = {}
        losses = []
        for micro, inputs in enumerate(micro_inputs):
            loss, found = self._micro_batch(inputs, (seed, step, micro), 1.0 / len(micro_inputs))
            losses.append(loss)
            for key, gradient in found.items():
                sums[key] = sums[key] + gradient if key in sums else gradient
        totals: dict[str, Tensor] = {}
        for name, stage in sorted(sums, key=lambda key: -key[1]):
            part = sums[name, stage]
            totals[name] = totals[name] + part if name in totals else part
        return torch.stack(losses).mean(), {
            name: totals[name] for name in self.parameters if name in totals
        }

    def _micro_batch(
        self, inputs: Mapping[str, Tensor], key: Key, share: float
    ) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        leaves: dict[tuple[str, int], Tensor] = {}

        def leaf(param: str, op: str) -> Tensor:
            canonical = self.graph.param[param].canonical
            if canonical not in self.parameters:
                return self.buffers[param]
            place = canonical, self.stage_of.get(op, 0) if self.leaves_per_stage else 0
            if place not in leaves:
                leaves[place] = self.parameters[canonical].detach().requires_grad_()
            return leaves[place]

        assert self.graph.loss is not None
        found = run_graph(
            self.graph,
            self.buffers,
            inputs,
            order=self.order,
            leaf=leaf,
            key=lambda op: self._keyed(op, key),
            values=[self.graph.loss],
            functions=self.functions,
        )
        loss = found[self.graph.loss]
        assert isinstance(loss, Tensor)
        seed = torch.full_like(loss, share)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(leaves.values()), seed, allow_unused=True
        )
        pairs = zip(leaves, gradients, strict=True)
        return loss.detach(), {place: gradient for place, gradient in pairs if gradient is not None}

    @contextmanager
    def _keyed(self, op: Op, key: Key) -> Iterator[None]:
        reseed(key, place_name(*self.places[op.name]), torch.device("cpu"))
        yield


def train_reference(
    reference: Reference,
    batches: Callable[[int], list[Mapping[str, Tensor]]],
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    lr_scale: Callable[[int], float] | None,
    clip_norm: float | None,
    steps: int,
    seed: int,
) -> Trace:
    """Train in one process; `batches(step)` gives the step's micro-batches by input name."""
    trace = Trace()
    chosen = optimizer(list(reference.parameters.items()))
    base = [group["lr"] for group in chosen.param_groups]
    for step in range(steps):
        loss, gradients = reference.gradients(batches(step), seed, step)
        trace.losses.append(loss.double())  # a bundle tells its loss as a number
        for name, parameter in reference.parameters.items():
            parameter.grad = gradients.get(name)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(reference.parameters.values()), clip_norm)
        if step == 0:
            trace.gradients.update(
                {n: p.grad.clone() for n, p in reference.parameters.items() if p.grad is not None}
            )
        for group, lr in zip(chosen.param_groups, base, strict=True):
            group["lr"] = lr * lr_scale(step) if lr_scale else lr
        chosen.step()
        chosen.zero_grad(set_to_none=True)
    trace.tensors.update({name: p.detach() for name, p in reference.parameters.items()})
    trace.tensors.update(reference.buffers)
    return trace
