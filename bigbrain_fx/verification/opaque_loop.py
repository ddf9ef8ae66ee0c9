"""The user's loop beside a bundle that runs the user's own step: whole batches, of any shape.

Random numbers of torch, Python and NumPy are keyed by step and micro-batch, as in the bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bigbrain_fx.frontend import UserStep
from bigbrain_fx.runtime import keep_sparse_apart, needs_closure, needs_metrics
from bigbrain_fx.verification import laid_tensors, plain_batches
from bigbrain_fx.verification.draws import reseed
from bigbrain_fx.verification.eager import TrainingLoop


class OpaqueLoop(TrainingLoop):
    """The loop, step by step, with nothing of a graph around it."""

    draws = ""

    def _settle_route(self) -> None:
        keep_sparse_apart(self.model)
        self.split = {path: dim for path, dim in self.wanted.entries.items() if dim is not None}
        self.sums: dict[str, dict[int, Tensor]] = {}
        self.user = UserStep(self.model, self.file.loss, self.wanted.call, self.file.autocast)
        self.batches: list[object] = []

    def _optimizer(self) -> torch.optim.Optimizer:
        reseed((self.wanted.seed, 0, 0), "optimizer")
        return super()._optimizer()

    def run_step(self, folder: Path) -> dict[str, object]:
        """Run one training step; leave the gradients that the optimizer gets, and all tensors."""
        made = self.optimizer
        assert made is not None
        self.batches, losses = self.micro_batches(self.step + 1), list[float]()

        def compute() -> Tensor:
            self.model.zero_grad(set_to_none=True)
            for group in made.param_groups:  # a criterion's weights may be among them
                for parameter in group["params"]:
                    parameter.grad = None
            found = self.forward_and_backward(self.batches)
            self._clip()
            if not losses:
                losses.extend(found)
                laid_tensors.save(self.gradients(), folder / "gradients")
            return torch.tensor(found[0])

        asks = needs_closure(made)
        if not asks:
            compute()
        reseed((self.wanted.seed, self.step, 0), "update")
        self.losses = losses
        self._step(*[compute] * asks)
        laid_tensors.save(self.state(), folder / "after")
        return {"losses": losses}

    def _advance_scheduler(self) -> None:
        if self.scheduler is not None and needs_metrics(self.scheduler):
            self.scheduler.step(self.losses[0])
        else:
            super()._advance_scheduler()

    def _take_gradients(self, micro: int) -> None:
        """Add a micro-batch's gradients to those of its replica; after the last, all replicas'."""
        if not self.wanted.replicas:
            return
        own = next(r for r, micros in enumerate(self.wanted.replicas) if micro in micros)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                sums = self.sums.setdefault(name, {})
                sums[own] = sums[own] + parameter.grad if own in sums else parameter.grad
                parameter.grad = None
        if micro + 1 == len(self.batches):
            self._add_gradients()

    def _add_gradients(self) -> None:
        """Add the replicas' gradients, in their order."""
        for name, parameter in self.model.named_parameters():
            of_replica = self.sums.pop(name, {})
            for own in sorted(of_replica):
                found = of_replica[own]
                parameter.grad = found if parameter.grad is None else parameter.grad + found

    def _parts(self) -> list[object]:
        """Return the parts of the batch, or itself where it is not cut."""
        if self.wanted.micro_batches == 1:
            return [self.batch]
        count = min(self.wanted.micro_batches, self._rows(self.batch))
        cut = (plain_batches.part_of(self.split, m, count) for m in range(count))
        return [plain_batches.tensors_of(self.batch, part) for part in cut]

    def _next(self) -> object:
        batch = next(self.data)
        while self.file.drop_last and self._rows(batch) < self.wanted.rows:
            batch = next(self.data)
        return batch

    def _step_weights(self, batches: Sequence[object]) -> list[float]:
        return [1.0] if len(batches) == 1 else self._weights(batches)
