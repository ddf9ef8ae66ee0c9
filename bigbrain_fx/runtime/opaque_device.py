"""A device that runs the user's training step as the user has it: nothing of it is traced.

    batch ─▶ model, loss ─▶ loss.backward() ─▶ clip ─▶ optimizer.step() ─▶ scheduler.step()

Hooks, `.grad`, plain attributes and Python itself therefore work as in a loop of the user's own.
Only the random numbers are keyed by step and micro-batch, so that a replayed step draws the same.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .compared_stream import AgreeingTransport, Subject
from .data import Stream
from .device import Device
from .forward_device import ForwardDevice
from .kept import seed_python
from .modules import AGAIN, WeightsError, reseed, seed_of
from .opaque_state import ObjectStates, others_of
from .optimizer_state import needs_closure
from .planned_sums import share_of
from .recipe import Optimizer, Training
from .weights import require_owners
from .whole_batches import WholeBatches


class OpaqueDevice(Device):
    """Run the user's training step; emitted classes fill in `step_loss` and `step_once`.

    Attributes:
        stages: of the one stage, the model file's `model`: a module, or what makes it.
    """

    stream_type = WholeBatches
    is_opaque = True
    stages: Mapping[int, Any] = {}  # no Stage: the user's own
    stream: WholeBatches

    def __init__(
        self, transport: AgreeingTransport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self._roots: dict[int, Tensor] = {}
        self.objects = ObjectStates(self)
        self._compared = False  # this step's batch with the others'

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return next(iter(self.modules.values()))

    def _empty(self, stage: Any) -> Any:  # noqa: ANN401  # the user's model
        torch.manual_seed(self.seed)
        if isinstance(stage, nn.Module):
            stage = copy.deepcopy(stage) if len(self.names) > 1 else stage
        made: nn.Module = (stage if isinstance(stage, nn.Module) else stage()).to(self.device)
        keep_sparse_apart(made)
        return made.train()

    # ------------------------------------------------------------------ set-up

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the model its weights; see `Device.load`."""
        ForwardDevice.load(self, tensors, owner)
        require_owners(self.held)

    def _fill(self, number: int, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        _fill_model(module, tensors)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.held.of_stage[number] = [*trained]
        self.held.parameters.update(trained)

    def train_with(self, training: Training) -> None:
        """Make the user's optimizer and scheduler."""
        self._seed_draws((self.seed, 0, 0), "optimizer")
        super().train_with(training)

    def state(self) -> dict[str, Tensor]:
        """Return the model's tensors by their names."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        buffers = self.model.named_buffers(remove_duplicate=False)
        return {name: tensor.detach() for name, tensor in (*parameters, *buffers)}

    # ------------------------------------------------------------------ a step

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self._compared = False

    def step_loss(self, batch: Any) -> Any:  # noqa: ANN401  # of any kind
        """Run forward and loss on a micro-batch; emitted."""
        raise TypeError("a device file defines step_loss")

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> None:
        """Compute a micro-batch's loss; an optimizer that asks for it by a closure does itself."""
        if not self._asks_for_loss() and self._counts(micro):
            self._roots[micro] = self._loss_of(micro)

    def backward(self, stage: int, micro: int, /, **sent: Tensor | None) -> None:
        """Call `backward()` on a micro-batch's share of the loss."""
        root = self._roots.pop(micro, None)
        if root is None:
            return
        self._share(root, micro).backward()
        if self.replicas is not None:
            self._hand_over(stage, micro)

    def _loss_of(self, micro: int) -> Tensor:
        self._compare_batch()
        self._seed_draws(self._key(micro), "")
        loss = own_loss(self.step_loss(self.stream.micro_batch(micro)))
        self._now.losses.setdefault(micro, loss.detach().reshape(()))
        if self._looks_at_once():
            self._require_finite()
        return loss

    def _compare_batch(self) -> None:
        if not self._compared and len(self.names) > 1:
            self.transport.agree(Subject(self.step), self.stream.digest(), self.name)
        self._compared = True

    def _counts(self, micro: int) -> bool:
        """Whether a micro-batch has rows, and weighs anything."""
        if self.stream.weights and not self.stream.weights[micro]:
            self._now.losses[micro] = torch.zeros((), device=self.device)
            return False
        return True

    def _share(self, loss: Tensor, micro: int) -> Tensor:
        """Return what a micro-batch's loss is of the step's, times the loss scale."""
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        if self.micro_batches == 1:
            return loss
        return share_of(loss, self.stream.weights or (1,) * self.micro_batches, micro)

    def _hand_over(self, stage: int, micro: int) -> None:
        """Give a micro-batch's gradients to the sums over replicas."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._add(name, stage, micro, parameter.grad)
                parameter.grad = None

    def _seed_draws(self, key: tuple[int, int, int], place: str) -> None:
        """Seed the generators that all share: torch's, Python's and NumPy's."""
        reseed(key, place, torch.device("cpu"))
        if self.device.type != "cpu":
            reseed(key, place, self.device)
        seed_python(seed_of(key, place))

    # ------------------------------------------------------------------ once a step

    def _may_update(self) -> bool:
        if self.replicas is None:
            held = self.parameters.items()
            stage = next(iter(self.modules))
            self._now.gradients = {(n, stage): p.grad for n, p in held if p.grad is not None}
        return super()._may_update()

    def _update(self, optimizer: Optimizer) -> None:
        if self.replicas is not None or self.loss_scale is not None:
            found = self._now.summed()
            for name, parameter in self.parameters.items():
                parameter.grad = found.get(name)
        if self._asks_for_loss():
            self._end_update(optimizer, self._closure)
            return
        self._prepare_update()
        self._end_update(optimizer)

    def _prepare_update(self) -> None:
        """Clip the gradients; keep those of the first step, for `verify`."""
        limit = self.training.clip_norm
        limit = limit() if callable(limit) else limit
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if self.step == 0 and self.first_gradients is None:
            given = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
            self.first_gradients = {n: g.to_dense().clone() for n, g in given.items()}

    def _end_update(self, optimizer: Optimizer, *closure: Callable[[], Any]) -> None:
        self._seed_draws((self.seed, self.step, 0), "update")
        self.rates.set(self.step)
        optimizer.step(*closure)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Let no parameter have a gradient, also of a criterion that the optimizer steps."""
        self.model.zero_grad(set_to_none=True)
        for parameter in others_of(self.model, self.optimizer).values():
            parameter.grad = None

    def _advance_rates(self) -> None:
        scheduler = self.rates.scheduler
        if scheduler is not None and needs_metrics(scheduler):
            loss = self.loss_now()
            assert loss is not None
            scheduler.step(float(loss))
        else:
            super()._advance_rates()

    def _asks_for_loss(self) -> bool:
        return self.optimizer is not None and needs_closure(self.optimizer)

    def _closure(self) -> Tensor:
        """Compute the step's loss and gradients anew, as `optimizer.step(closure)` asks."""
        self._clear_gradients()
        losses = []
        for micro in filter(self._counts, range(self.micro_batches)):
            losses.append(self._share(self._loss_of(micro), micro))
            losses[-1].backward()
        self._prepare_update()
        return torch.stack([loss.detach().reshape(()) for loss in losses]).sum()

    def give_up_step(self) -> None:
        """Be as this step began, as far as gradients go."""
        super().give_up_step()
        self._roots.clear()
        self._clear_gradients()


def own_loss(output: Any) -> Tensor:  # noqa: ANN401  # of any model
    """Return the loss in what a model returns; see `loss_in`."""
    found = loss_in(output)
    assert found is not None
    return found


def loss_in(output: Any) -> Tensor | None:  # noqa: ANN401  # of any model or loss function
    """Return the loss that a model or a loss function gives: a tensor, or the one in its output.

    That is the entry `loss` of a dict or an object; of a tuple the only number, or the only one
    with a gradient.
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else None
    found = getattr(output, "loss", None) if found is None else found
    if found is None and isinstance(output, tuple | list):
        numbers = [t for t in output if isinstance(t, Tensor) and not t.dim()]
        numbers = [t for t in numbers if t.is_floating_point()]
        trained = [t for t in numbers if t.requires_grad] if len(numbers) > 1 else numbers
        found = trained[0] if len(trained) == 1 else None
    return found if isinstance(found, Tensor) else None


def current(module: str, name: str) -> Callable[[], Any]:
    """Return what reads a name of the model file at each call: its code may change it."""
    return lambda: getattr(sys.modules[module], name)


def keep_sparse_apart(module: nn.Module) -> None:
    """Let sparse buffers be plain attributes: no file of weights holds one, and model() makes it.

    A graph's adjacency is one; layers read it as before, by its name.
    """
    for part in module.modules():
        for name, buffer in [*part._buffers.items()]:
            if buffer is not None and buffer.layout != torch.strided:
                del part._buffers[name]
                setattr(part, name, buffer)


@torch.no_grad()
def _fill_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model of the user's own, by their names in it; each tied one once.

    Raises:
        WeightsError: one is missing, or has another shape.
    """
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        found = tensors[name]
        if is_lazy(held):
            held.materialize(found.shape)
        if found.shape != held.shape:
            raise WeightsError(
                f"{name} should have the shape {tuple(held.shape)}, found {tuple(found.shape)}: "
                f"model() builds another model than when it was split; split again, or {AGAIN}",
                code="BX5193",
            )
        held.copy_(found)


def needs_metrics(scheduler: Any) -> bool:  # noqa: ANN401  # of any kind
    """Whether `step` of a scheduler asks for the loss, as that of ReduceLROnPlateau does."""
    metrics = inspect.signature(scheduler.step).parameters.get("metrics")
    return metrics is not None and metrics.default is inspect.Parameter.empty
