"""A plan's training in one process: plain optimizers, torch's own loss scale and schedulers.

    reference ─▶ gradients of each rank ─▶ clipped ─▶ an optimizer each ─▶ Trace

With `--asynchronous` gradients are of older weights. Every leaf of the reference reads as many
updates back as its stage is behind, by the number of the step or micro-batch alone. It knows a
reference that gives gradients, and no schedule, and shares no arithmetic with the runtime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Stages
from bigbrain_fx.frontend import ModelFile
from bigbrain_fx.runtime import Training
from bigbrain_fx.verification import plain_batches
from bigbrain_fx.verification.reference import MembersReference, Reference
from bigbrain_fx.verification.trace import Trace

Batches = Callable[[int], list[Mapping[str, Tensor]]]
Recipe: TypeAlias = ModelFile | Training


class Stepper:
    """An optimizer of some parameters, with the rates that the model file asks for."""

    def __init__(self, training: Recipe, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters, self.training = parameters, training
        make = training.optimizer or torch.optim.AdamW
        self.optimizer = make(list(parameters.items()))
        self.base: list[Any] = [group.get("lr") for group in self.optimizer.param_groups]
        schedule: Any = getattr(training, "scheduler", None)
        self.scheduler = schedule(self.optimizer) if schedule else None

    def give(self, gradients: Mapping[str, Tensor]) -> None:
        """Give each parameter its gradient, or none."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

    @property
    def given(self) -> dict[str, Tensor]:
        """Present gradients of its parameters."""
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def set_rate(self, step: int) -> None:
        """Set the rates of a step."""
        if self.training.lr_scale is not None:
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * self.training.lr_scale(step)

    def end(self) -> None:
        """End a step, updated or not."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)


def norm_of(gradient: Tensor | None) -> Tensor:
    """Return a gradient's norm; zero if there is none."""
    return torch.zeros(()) if gradient is None else torch.linalg.vector_norm(gradient)


def clipped(found: Mapping[str, Tensor], norms: Sequence[Tensor], most: float) -> dict[str, Tensor]:
    """Scale gradients by the norm of all norms, as `torch.nn.utils.clip_grad_norm_` says it."""
    factor = (most / (torch.linalg.vector_norm(torch.stack([*norms])) + 1e-6)).clamp(max=1.0)
    return {name: gradient * factor for name, gradient in found.items()}


def train_reference(
    reference: Reference | MembersReference,
    batches: Batches,
    training: Training,
    steps: int,
    seed: int,
) -> Trace:
    """Train all ranks in one process, each by an optimizer of its own, under one loss scale."""
    loop = _Loop(reference, training)
    for step in range(steps):
        loop.run(step, batches(step), seed)
    return loop.ended()


class _Loop:
    """A reference with the optimizers of its ranks, which one loss scale of torch's steps."""

    def __init__(self, reference: Reference | MembersReference, training: Training) -> None:
        self.reference, self.training, self.trace = reference, training, Trace()
        self.updates = [Stepper(training, own) for own in reference.trained]
        is_one = len(self.updates) == 1
        self.optimizer: Any = self.updates[0].optimizer if is_one else _Together(self.updates)
        scaling: Any = getattr(training, "grad_scaler", None) or {"enabled": False}
        self.scaler = torch.amp.GradScaler("cpu", **scaling)

    def run(self, step: int, batches: Sequence[Mapping[str, Tensor]], seed: int) -> None:
        self.scaler.scale(torch.zeros(()))  # it makes its scale with the first
        loss, gradients = self.reference.of_each(batches, seed, step, self.scaler.get_scale())
        self.trace.losses.append(loss.double())  # a bundle tells its loss as a number
        is_finite = all(bool(g.isfinite().all()) for own in gradients for g in own.values())
        for update, own in zip(self.updates, gradients, strict=True):
            update.give({n: gradient.clone() for n, gradient in own.items()})  # it may write there
        self._clip()
        if self.scaler.is_enabled() and not is_finite:
            self.trace.left_out.add(step)
        elif step == 0:  # an optimizer may write into them: a bundle's are looked at after it
            self._take(self.trace.gradients, [update.given for update in self.updates])
        self._update(step)

    def _clip(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        limit, every = self.training.clip_norm, self.reference.trained[0]
        if limit is None:
            return
        if len(self.updates) == 1 and len({p.dtype for p in every.values()}) == 1:
            torch.nn.utils.clip_grad_norm_([*every.values()], limit)
            return
        # of several types torch adds norms type by type, in an order of a hash table's
        norms = self._norms()
        for update in self.updates:
            update.give(clipped(update.given, norms, limit))

    def _norms(self) -> list[Tensor]:
        """Return the norms of what each rank answers for: the first of whole ones, all parts."""
        return [
            norm_of(update.given.get(name))
            for name in self.reference.trained[0]
            for member, update in enumerate(self.updates)
            if not member or (name, member) in self.reference.shards
        ]

    def _update(self, step: int) -> None:
        for update in self.updates:
            update.set_rate(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for update in self.updates:
            update.end()

    def _take(self, into: dict[str, Tensor], found: Sequence[Mapping[str, Tensor]]) -> None:
        for member, own in enumerate(found):
            named = {self.reference.stored(name, member): tensor for name, tensor in own.items()}
            self.trace.take(into, named)

    def ended(self) -> Trace:
        """Return what was noted, with each rank's tensors as they are now."""
        held = zip(self.reference.trained, self.reference.fixed, strict=True)
        self._take(
            self.trace.tensors,
            [{**{n: p.detach() for n, p in own.items()}, **fixed} for own, fixed in held],
        )
        return self.trace


class _Together(torch.optim.Optimizer):
    """All ranks' optimizers as one: a loss scale looks at all gradients before any steps."""

    def __init__(self, updates: Sequence[Stepper]) -> None:
        super().__init__([p for each in updates for p in each.parameters.values()], {})
        self.optimizers = [each.optimizer for each in updates]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step each."""
        for optimizer in self.optimizers:
            optimizer.step()


# --------------------------------------------------------------------------- older weights


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
