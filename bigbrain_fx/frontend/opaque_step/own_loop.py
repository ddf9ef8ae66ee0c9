"""A training loop of a caller's module in the caller's process: nothing of it is split.

    batch ─▶ model, loss ─▶ loss.backward() ─▶ clip ─▶ optimizer.step() ─▶ scheduler.step()

It does what the lines of a loop in plain PyTorch do, and draws from this process's generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.opaque_step.trial import made_optimizer, try_step
from bigbrain_fx.frontend.opaque_step.user_step import UserStep
from bigbrain_fx.runtime import needs_closure, needs_metrics

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile


class OwnLoop:
    """Steps of a module, each on a whole batch.

    One step is tried in a fork first.

    Attributes:
        optimizer, scheduler, scaler: of the loop; the last two may be None, or do nothing.
        step_number: of the next step, from 0.

    Args:
        file: the module, and how it is trained.

    Raises:
        InputError: plain PyTorch does not train it, either; or the optimizer is another model's.
    """

    def __init__(self, file: ModelFile) -> None:
        call, _ = try_step(file, 0)
        self._file, self._model = file, file.model
        self._user = UserStep(file.model, file.loss, call, file.autocast)
        self.optimizer, self.scheduler = made_optimizer(file)
        self._require_own_parameters()
        kind = next((p.device.type for p in file.model.parameters()), "cpu")
        scaling: Any = file.grad_scaler or {"enabled": False}
        self.scaler = torch.amp.GradScaler(kind, **scaling)
        self.step_number = 0
        self._modes = {path: part.training for path, part in file.model.named_modules()}
        self._trains = file.model.training

    def step(self, batch: object) -> float:
        """Train on a batch; return its loss."""
        losses = list[Tensor]()

        def compute() -> Tensor:
            self._forget_gradients()
            loss = self._user.loss_of(batch)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
            self._clip()
            return losses[-1]

        with self._training():
            self._update(compute)
        self._advance_scheduler(losses[0])
        self._forget_gradients()
        self.step_number += 1
        return float(losses[0])

    def _update(self, compute: Any) -> None:  # noqa: ANN401  # a closure, as of torch
        if needs_closure(self.optimizer):
            self._set_rates()
            self.optimizer.step(compute)
            return
        compute()
        self._set_rates()  # as a loop does: after the gradients
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _clip(self) -> None:
        if self._file.clip_norm is None:
            return
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._model.parameters(), self._file.clip_norm)

    def _set_rates(self) -> None:
        if self._file.lr_scale is None:
            return
        scale = self._file.lr_scale(self.step_number)
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale

    def _advance_scheduler(self, loss: Tensor) -> None:
        if self.scheduler is None:
            return
        if needs_metrics(self.scheduler):
            self.scheduler.step(loss)  # type: ignore[arg-type]  # its metrics
        else:
            self.scheduler.step()

    def _forget_gradients(self) -> None:
        """Set all to None; the optimizer may have some of them only, or those of a loss."""
        of_groups = (p for group in self.optimizer.param_groups for p in group["params"])
        for parameter in (*self._model.parameters(), *of_groups):
            parameter.grad = None

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Let a module that validates train meanwhile, its parts as they did at the beginning."""
        if self._model.training:
            yield
            return
        parts = dict(self._model.named_modules())
        before = {path: part.training for path, part in parts.items()}
        for path, part in parts.items():
            part.training = self._modes.get(path, True) if self._trains else True
        try:
            yield
        finally:
            for path, mode in before.items():
                parts[path].training = mode

    def _require_own_parameters(self) -> None:
        own = {id(p) for p in self._model.parameters()}
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not any(id(p) in own for p in stepped):
            raise InputError(
                "the optimizer has no parameter of the model",
                code="BX2207",
                help="make it of model.parameters()",
            )
