"""The recurrence of `--asynchronous`, in one process: gradients of older weights, in a plain loop.

It keeps the weights after each update, and lets every leaf of the reference read as many updates
back as its stage is behind. It knows no schedule: which version it is follows from the number of
the step, or of the micro-batch, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from bigbrain_fx.core import Graph, Stages
from bigbrain_fx.runtime import Training
from bigbrain_fx.verification import plain_batches
from bigbrain_fx.verification.reference import Reference
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.verification.training import Batches, Stepper, train_reference


class StaleReference(Reference):
    """A reference whose leaves are older weights."""

    def __init__(self, *about: Any) -> None:  # noqa: ANN401  # as a Reference
        super().__init__(*about)
        self.history: deque[dict[str, Tensor]] = deque(maxlen=max(2, len(self.stages.stages)))
        self.note()

    def note(self) -> None:
        """Keep the weights of now."""
        self.history.append({n: p.detach().clone() for n, p in self.parameters.items()})

    def weight(self, member: int, name: str, stage: int) -> Tensor:
        """Return what a stage computes with: of one step before, or as many updates as it waits."""
        back = 1 if self.stages.asynchronous == "2bw" else self.stages.ahead(stage)
        return self.history[max(0, len(self.history) - 1 - back)][name]

    def updates(
        self, batches: list[Mapping[str, Tensor]], seed: int, step: int
    ) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Yield loss and gradients of each update of a step."""
        if self.stages.asynchronous == "2bw":
            yield self.gradients(batches, seed, step)
            return
        for micro, inputs in enumerate(batches):
            key = seed, step, micro
            loss, (found,) = self.of_micro_batch(inputs, key, lambda whole: whole, 1.0)
            yield loss, {name: gradient for (name, _), gradient in found.items()}


def trained_once(
    about: tuple[Graph, Stages, Mapping[str, Tensor], Mapping[str, object]],
    batches: Batches,
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
    reference: StaleReference, batches: Batches, training: Training, steps: int, seed: int
) -> Trace:
    """Train as `train_reference` does, by the recurrence of the plan."""
    trace, stepper = Trace(), Stepper(training, reference.parameters)
    for step in range(steps):
        stepper.set_rate(step)
        losses = []
        for loss, gradients in reference.updates(batches(step), seed, step):
            losses.append(loss)
            stepper.give(gradients)
            if step == 0:
                trace.gradients.update({n: g.clone() for n, g in gradients.items()})
            stepper.optimizer.step()
            stepper.optimizer.zero_grad(set_to_none=True)
            reference.note()
        stepper.end()
        trace.losses.append(plain_batches.mean(losses, [1.0] * len(losses)).double())
    trace.tensors.update({name: p.detach() for name, p in reference.parameters.items()})
    trace.tensors.update(reference.buffers)
    return trace
