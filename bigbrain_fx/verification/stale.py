"""The recurrence of `--asynchronous`, in one process: gradients of older weights, in a plain loop.

It keeps the weights after each update, and lets every leaf of the reference read as many updates
back as its stage is behind. It knows no schedule: which version it is follows from the number of
the step, or of the micro-batch, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bigbrain_fx.core import Graph, Stages
from bigbrain_fx.runtime import Training, mean_loss
from bigbrain_fx.verification.reference import (
    Gradients,
    Key,
    Reference,
    Trace,
    train_reference,
)

Batches = list[Mapping[str, Tensor]]


@dataclass
class StaleReference(Reference):
    """A reference whose leaves are older weights."""

    history: deque[dict[str, Tensor]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history = deque(maxlen=max(2, len(self.stages.stages)))
        self.note()

    def note(self) -> None:
        """Keep the weights of now."""
        self.history.append({n: p.detach().clone() for n, p in self.parameters.items()})

    def weight(self, name: str, stage: int) -> Tensor:
        """Return what a stage computes with: of one step before, or as many updates as it waits."""
        back = 1 if self.stages.asynchronous == "2bw" else self.stages.ahead(stage)
        return self.history[max(0, len(self.history) - 1 - back)][name]

    def one(self, inputs: Mapping[str, Tensor], key: Key) -> tuple[Tensor, Gradients]:
        """Return loss and gradients of one micro-batch that is a batch of its own."""
        return self._micro_batch(inputs, key, lambda whole: whole, 1.0)


def trained_once(
    about: tuple[Graph, Stages, Mapping[str, Tensor], Mapping[str, object]],
    batches: Callable[[int], Batches],
    training: Training,
    steps: int,
    seed: int,
) -> Trace:
    """Train what a plan says in one process: a graph, by stages, with weights and functions."""
    how = batches, training, steps, seed
    if about[1].asynchronous:
        return train_stale(StaleReference(*about), *how)
    return train_reference(Reference(*about), *how)


def train_stale(
    reference: StaleReference,
    batches: Callable[[int], Batches],
    training: Training,
    steps: int,
    seed: int,
) -> Trace:
    """Train as `train_reference` does, by the recurrence of the plan."""
    trace, parameters = Trace(), reference.parameters
    optimizer = training.optimizer(list(parameters.items()))
    base = [group["lr"] for group in optimizer.param_groups]
    scheduler = training.scheduler(optimizer) if training.scheduler else None
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * training.lr_scale(step) if training.lr_scale else group["lr"]
        losses = []
        for loss, gradients in _updates(reference, batches(step), seed, step):
            losses.append(loss)
            for name, parameter in parameters.items():
                parameter.grad = gradients.get(name)
            if step == 0:
                trace.gradients.update({n: g.clone() for n, g in gradients.items()})
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            reference.note()
        if scheduler is not None:
            scheduler.step()
        trace.losses.append(mean_loss(losses, ()).double())
    trace.tensors.update({name: p.detach() for name, p in parameters.items()})
    trace.tensors.update(reference.buffers)
    return trace


def _updates(
    reference: StaleReference, batches: Batches, seed: int, step: int
) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Yield loss and gradients of each update of a step."""
    if reference.stages.asynchronous == "2bw":
        yield reference.gradients(batches, seed, step)
        return
    for micro, inputs in enumerate(batches):
        loss, found = reference.one(inputs, (seed, step, micro))
        yield loss, {name: gradient for (name, _), gradient in found.items()}
