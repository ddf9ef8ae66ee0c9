"""The reference of a plan with tensor groups in training: an optimizer each, one loss scale of all.

It knows a reference that gives gradients; how members make them is in `members`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.runtime import Training, are_finite, clipped, norm
from bigbrain_fx.verification.members import MembersReference
from bigbrain_fx.verification.reference import Trace
from bigbrain_fx.verification.stepping import Stepper


def train_members(
    reference: MembersReference,
    batches: Callable[[int], list[Mapping[str, Tensor]]],
    training: Training,
    steps: int,
    seed: int,
) -> Trace:
    """Train all members in one process, each by an optimizer of its own, under one loss scale."""
    loop = _Loop(reference, training)
    for step in range(steps):
        loop.run(step, batches(step), seed)
    return loop.ended()


class _Loop:
    """A reference with the optimizers of its members, which one loss scale of torch's steps."""

    def __init__(self, reference: MembersReference, training: Training) -> None:
        self.reference, self.training, self.trace = reference, training, Trace()
        self.updates = [Stepper(training, own) for own in reference.parameters]
        self.together = _Together(self.updates)
        scaling: Any = getattr(training, "grad_scaler", None) or {"enabled": False}
        self.scaler = torch.amp.GradScaler("cpu", **scaling)

    def run(self, step: int, batches: Sequence[Mapping[str, Tensor]], seed: int) -> None:
        self.scaler.scale(torch.zeros(()))  # it makes its scale with the first
        found = self.reference.gradients(batches, seed, step, self.scaler.get_scale())
        loss, gradients = found
        self.trace.losses.append(loss.double())
        for update, own in zip(self.updates, gradients, strict=True):
            update.give({n: gradient.clone() for n, gradient in own.items()})  # it may write there
        self._clip()
        if not all(are_finite(own.values()) for own in gradients) and self.scaler.is_enabled():
            self.trace.left_out.add(step)
        elif step == 0:
            self._keep_gradients()
        self._update(step)

    def _clip(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.together)
        if self.training.clip_norm is None:
            return
        norms = _norms(self.reference, [update.given for update in self.updates])
        for update in self.updates:
            update.give(clipped(update.given, norms, self.training.clip_norm))

    def _keep_gradients(self) -> None:
        """Optimizers may write into them: a bundle's are looked at after its step."""
        for member, update in enumerate(self.updates):
            own = {self.reference.stored(n, member): g for n, g in update.given.items()}
            self.trace.take(self.trace.gradients, own)

    def _update(self, step: int) -> None:
        for update in self.updates:
            update.set_rate(step)
        self.scaler.step(self.together)
        self.scaler.update()
        for update in self.updates:
            update.end()

    def ended(self) -> Trace:
        """Return what was noted, with each member's tensors as they are now."""
        for member, params in enumerate(self.reference.parameters):
            trained = {n: p.detach() for n, p in params.items()}
            held = {**trained, **self.reference.buffers[member]}
            own = {self.reference.stored(n, member): t for n, t in held.items()}
            self.trace.take(self.trace.tensors, own)
        return self.trace


def _norms(reference: MembersReference, gradients: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the norms of what each member answers for: the first of whole ones, all of parts."""
    return [
        norm(own.get(name), reference.parameters[member][name])
        for name in reference.parameters[0]
        for member, own in enumerate(gradients)
        if not member or (name, member) in reference.shards
    ]


class _Together(torch.optim.Optimizer):
    """All members' optimizers as one: a loss scale looks at all gradients before any steps."""

    def __init__(self, updates: Sequence[Stepper]) -> None:
        super().__init__([p for each in updates for p in each.parameters.values()], {})
        self.optimizers = [each.optimizer for each in updates]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step each."""
        for optimizer in self.optimizers:
            optimizer.step()
