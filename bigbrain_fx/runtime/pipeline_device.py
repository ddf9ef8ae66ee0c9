"""One device of a pipeline in training: the methods that the emitted `step_once()` calls.

    recv ──▶ forward ──▶ send      activations, to later stages
    send ◀── backward ◀── recv     gradients, to earlier stages; summed over micro-batches
    tied gradients, norms ──▶ optimizer_step

The emitted file decides on the order of computations; this file only runs them. The module knows no
schedule, and nothing but the plain pipeline: in other bundles `device` has the additions of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .channel import Channel, Transport
from .forward_device import ForwardDevice
from .gradients import StepSums, clipped, gradients
from .recipe import LearningRates, Optimizer, Training
from .stream import BatchStream

Hook = Callable[[Tensor | None], Tensor | None]  # gradient -> what autograd keeps instead


@dataclass
class Saved:
    """Start of the backward pass of one stage and micro-batch."""

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor]


class PipelineDevice(ForwardDevice):
    """Run one device's part of every training step.

    Attributes:
        loss: the stage and the value to train on, if it is computed here.
    """

    loss: tuple[int, str] | None = None
    rates_type: type[LearningRates] = LearningRates

    def __init__(
        self, transport: Transport, stream: BatchStream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self._saved: dict[tuple[int, int], Any] = {}
        self._now = StepSums(self.held)
        self._backward_of = self._micro = -1
        self.updated: dict[str, nn.Parameter] = {}  # those that this device's optimizer has

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights, and each parameter a hook that adds up its gradients."""
        super().load(tensors, owner)
        for name, parameter in self.parameters.items():
            parameter.register_hook(self._adder(name, parameter))

    def train_with(self, training: Training) -> None:
        """Make the optimizer for this device's parameters, in the order of the model."""
        self.training = training
        self.updated = self._to_update()
        self.optimizer = training.optimizer([*self.updated.items()]) if self.updated else None
        self.rates = self.rates_type(self.optimizer, training.lr_scale, training.scheduler)

    def _to_update(self) -> dict[str, nn.Parameter]:
        return self.parameters

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self._now = self._sums()

    def _sums(self) -> StepSums:
        return StepSums(self.held)

    def loss_now(self) -> Tensor | None:
        """Return this step's loss, as far as it is computed, where it is reported."""
        return self._now.loss() if self._now.losses else None

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401
        """Run a stage forward; remember what its backward needs."""
        with self._drawing(micro):
            result = self._compute(stage, micro, values)
        if self.loss is not None and self.loss[0] == stage:
            self._now.losses[micro] = self._named(stage, result)[self.loss[1]].detach()
        return result

    def _compute(self, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        result = self.modules[stage](**values)
        saved = self._starting(stage, values, result)
        if saved.outputs:
            self._saved[stage, micro] = saved
        return result

    def _named(self, stage: int, result: Any) -> dict[str, Tensor]:  # noqa: ANN401  # as forward's
        results = result if isinstance(result, tuple | list) else (result,)
        return dict(zip(self.modules[stage].returns, results, strict=True))

    def _starting(self, stage: int, values: Mapping[str, Tensor], result: Any) -> Saved:  # noqa: ANN401
        """Return what a backward pass starts from: what wants a gradient of both ends."""
        return Saved(_wanting(values), _wanting(self._named(stage, result)))

    def backward(self, stage: int, micro: int, /, **sent: Tensor | None) -> Any:  # noqa: ANN401
        """Run a stage backward; return the gradients of what it received, in the order received.

        `sent` are the gradients of its results and, relayed from later readers, those of what it
        received. They enter as roots, so that the order of sums is that of an unsplit backward.
        """
        saved = self._start_of(stage, micro)
        roots, seeds = [], []
        if self.loss is not None and self.loss[0] == stage:
            roots.append(saved.outputs[self.loss[1]])
            seeds.append(self._seed(roots[0], micro))
        for name, gradient in sent.items():
            root = saved.outputs.get(name, saved.leaves.get(name))
            if root is not None:  # None: planned to want a gradient, but the forward detached it
                roots.append(self._root(root, gradient))
                seeds.append(torch.zeros_like(roots[-1]) if gradient is None else gradient)
        self._backward_of, self._micro = stage, micro
        own = [self.parameters[name] for name in self.held.of_stage[stage]]
        inputs = [*saved.leaves.values(), *own]
        found = self._gradients(stage, micro, roots, inputs, seeds)
        relayed = found[: len(saved.leaves)]
        return relayed[0] if len(relayed) == 1 else relayed

    def _start_of(self, stage: int, micro: int) -> Saved:
        saved: Saved = self._saved.pop((stage, micro))
        return saved

    def _seed(self, loss: Tensor, micro: int) -> Tensor:
        """Return what a micro-batch's loss counts of the step's."""
        return torch.full_like(loss, 1.0) / self.micro_batches

    def _root(self, root: Tensor, gradient: Tensor | None) -> Tensor:
        assert gradient is not None, "a plain pipeline has a gradient for all that wants one"
        return root

    def _gradients(
        self, stage: int, micro: int, roots: list[Tensor], inputs: list[Tensor], seeds: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return gradients(roots, inputs, seeds)

    def _adder(self, name: str, parameter: nn.Parameter) -> Hook:
        """Return a hook that adds up a parameter's gradient over micro-batches, in ascending order.

        autograd calls it as soon as the gradient is made, and keeps the zero that the hook gives
        back instead, so that a gradient's memory serves the next.
        """
        nothing = torch.zeros((), dtype=parameter.dtype, device=self.device).expand_as(parameter)

        def add(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            self._add(name, self._backward_of, self._micro, gradient)
            return nothing

        return add

    def _add(self, name: str, stage: int, micro: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter."""
        self._now.add(name, stage, gradient)

    def send_tied(self, channel: Channel) -> None:
        """Send this stage's gradient of a parameter that another device holds too."""
        self._send_if_any(channel, self._now.gradients.get((channel.value, channel.source)))

    def recv_tied(self, channel: Channel) -> None:
        """Take another stage's gradient of a parameter that this device holds too."""
        gradient = self._receive(channel)
        if gradient is not None:
            self._now.gradients[channel.value, channel.source] = gradient

    def send_norms(self, channel: Channel) -> None:
        """Send the norms of the gradients that this device answers for."""
        self._send(channel, self._now.own_norms())

    def recv_norms(self, channel: Channel) -> None:
        """Take the norms of the gradients that another device answers for."""
        self._now.take_norms(channel.sender, self._receive(channel))

    def optimizer_step(self) -> None:
        """Sum tied gradients, last stage first; clip by the global norm; update the parameters."""
        if self.optimizer is not None:
            self._update(self.optimizer)
        self._now.clear()
        self.rates.advance()

    def _update(self, optimizer: Optimizer) -> None:
        found = self._clipped(self._now.summed(), self.training.clip_norm)
        for name, parameter in self.updated.items():
            parameter.grad = found.get(name)
        self.rates.set(self.step)
        self._step(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def _clipped(self, found: dict[str, Tensor], limit: float | None) -> dict[str, Tensor]:
        return found if limit is None else clipped(found, self._now.all_norms(), limit)

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step()


def _wanting(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if value.requires_grad}
