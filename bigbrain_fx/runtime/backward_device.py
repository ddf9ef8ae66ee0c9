"""One device's stages run forward and backward: gradients, summed over micro-batches.

    recv ──▶ forward ──▶ send      what a backward starts from is kept
    send ◀── backward ◀── recv     gradients, to earlier stages; those of parameters add up

It knows no other replica, no norm and no optimizer; `device` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .data import Stream
from .finite import NotFiniteError, not_finite
from .forward_device import ForwardDevice
from .gradients import Parts, gradients, nothing_of
from .loss_scale import LossScale
from .loss_shares import share_of
from .recompute import Read, Twice
from .step_sums import StepSums
from .transport import Transport

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .replicas import Replicas
    from .statistics import Statistics
    from .stored_activations import ActivationStore, StoredRead
    from .stored_weights import StoredWeights
    from .unsharded import Unsharded

_NOTHING: Parts = MappingProxyType({})
Hook = Callable[[Tensor | None], Tensor | None]  # gradient -> what autograd keeps instead


@dataclass
class Saved:
    """What the backward pass of one stage and micro-batch starts from."""

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor]


class BackwardDevice(ForwardDevice):
    """Run one device's stages forward and backward.

    Attributes:
        recompute: stages that run forward again before each backward, and keep only what they
            received until then.
        loss: the stage and the value to train on, if it is made here.
        saving: stages of which what the forward saves lies in its store. See `stored_activations`.
    """

    recompute: tuple[int, ...] = ()
    loss: tuple[int, str] | None = None
    saving: tuple[int, ...] = ()

    def __init__(
        self, transport: Transport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.on_nan = "stop"  # or another of `finite.POLICIES`
        self._saved: dict[tuple[int, int], Saved | Read | StoredRead] = {}
        self._twice = {number: Twice(self.modules[number]) for number in self.recompute}
        self._now = StepSums(self.held)
        self._backward_of = self._micro = -1
        self.replicas: Replicas | None = None
        self.unsharded: Unsharded | None = None
        self.statistics: Statistics | None = None
        self.loss_scale: LossScale | None = None
        self.weights: StoredWeights | None = None
        self.saved: ActivationStore | None = None

    # ------------------------------------------------------------------ a step

    def loss_now(self) -> Tensor | None:
        """Return this step's loss, as far as it is computed, where it is reported."""
        if not self._now.losses or not self._reports():
            return None
        return self._now.loss(self.stream.weights)

    def _reports(self) -> bool:
        """Whether the losses made here are those to report: others have the same, or their own."""
        stage = self.loss[0] if self.loss else -1
        replica = self.replica_of_stage.get(stage, self.replica)
        return not replica and self.name in (self.members or (self.name,))[:1]

    def give_up_step(self) -> None:
        """Be as this step began, which nobody has updated in: it is begun again."""
        self._saved.clear()
        self._kept.clear()
        if self.group is not None:
            self.group.waiting.clear()
        if self.statistics is not None:
            self.statistics.take_back()

    # ------------------------------------------------------------------ instructions

    # What these two return is known per stage only: one tensor as it is, several as a tuple.

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401  # above
        """Run a stage forward; remember what its backward needs."""
        with self._weights(stage), self._drawing(micro), self._noting(stage, micro):
            if stage in self._twice:
                result, read = self._twice[stage].first(values)
                self._saved[stage, micro] = self._reading(stage, read)
            else:
                with self._storing(stage, values):
                    result = self.modules[stage](**values)
                saved = self._starting(stage, values, result)
                if saved.outputs:
                    self._saved[stage, micro] = saved
            if self.unsharded is not None:
                result = self.unsharded.apart(result)
        if self.loss is not None and self.loss[0] == stage:
            self._now.losses[micro] = self._named(stage, result)[self.loss[1]].detach()
            if self._looks_at_once():
                self._require_finite()
        return result

    def _reading(self, stage: int, read: Read) -> Read | StoredRead:
        """Return what a stage runs again with; what it received may lie in the store."""
        if self.saved is None or stage not in self.saving:
            return read
        return self.saved.put(read, [part for each in self.stream.parts.values() for part in each])

    def _weights(self, stage: int) -> AbstractContextManager[None]:
        """Have a stage's weights meanwhile, where other replicas, or the store, keep some."""
        if self.weights is not None:
            self.weights.visit(stage, self._now.gradients)
        return nullcontext() if self.unsharded is None else self.unsharded.whole(stage)

    def _storing(self, stage: int, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let what a stage's forward saves lie in the store, but for what is here anyway."""
        if self.saved is None or stage not in self.saving:
            return nullcontext()
        module = self.modules[stage]
        return self.saved.saving((*module.parameters(), *module.buffers(), *values.values()))

    def _noting(
        self, stage: int, micro: int, *, again: bool = False
    ) -> AbstractContextManager[None]:
        """Keep back what a forward writes, where other replicas write it or where it counts not."""
        sizes = self.stream.sizes
        counts = not sizes or sizes[micro] > 0
        if self.statistics is not None and self.statistics.has(stage):
            return self.statistics.noting(stage, micro, again=again, counts=counts)
        return nullcontext() if counts or again else Twice(self.modules[stage]).aside()

    def _named(self, stage: int, result: Any) -> dict[str, Tensor]:  # noqa: ANN401  # as forward's
        results = result if isinstance(result, tuple | list) else (result,)
        return dict(zip(self.modules[stage].returns, results, strict=True))

    def _starting(self, stage: int, values: Mapping[str, Tensor], result: Any) -> Saved:  # noqa: ANN401
        """Return what a backward pass starts from: what wants a gradient of both ends."""
        outputs = self._named(stage, result)
        return Saved(_wanting(values), _wanting(outputs))

    def backward(self, stage: int, micro: int, /, **sent: Tensor | None) -> Any:  # noqa: ANN401
        """Run a stage backward; return the gradients of what it received, in the order received.

        `sent` are the gradients of its results and, relayed from later readers, those of what it
        received: they enter as roots, so that they are added in the order of an unsplit backward
        pass. What has no gradient, None, gives none. The loss is seeded with its share of the
        step's, 1/M where rows are equal.
        """
        with self._weights(stage):
            return self._backward(stage, micro, sent)

    def _backward(self, stage: int, micro: int, sent: Mapping[str, Tensor | None]) -> Any:  # noqa: ANN401
        saved = self._saved.pop((stage, micro))
        if not isinstance(saved, Saved):
            saved = saved if isinstance(saved, Read) else saved.back()
            saved = self._run_again(stage, micro, saved)
        roots, seeds = [], []
        if self.loss is not None and self.loss[0] == stage:
            roots.append(saved.outputs[self.loss[1]])
            seeds.append(self._seed(roots[0], micro))
        for name, gradient in sent.items():
            root = saved.outputs.get(name, saved.leaves.get(name))
            if root is not None:  # None: planned to want a gradient, but the forward detached it
                roots.append(nothing_of(root) if gradient is None else root)
                seeds.append(torch.zeros_like(roots[-1]) if gradient is None else gradient)
        self._begin_micro(micro)
        self._backward_of, self._micro = stage, micro
        inputs = [
            *saved.leaves.values(),
            *(self.parameters[name] for name in self.held.of_stage[stage]),
        ]
        found = self._gradients(stage, micro, roots, inputs, seeds)
        if self.group is not None:
            for name, gradient in self.group.sums_of_waiting(self.parameters).items():
                self._add(name, stage, micro, gradient)
        relayed = found[: len(saved.leaves)]
        return relayed[0] if len(relayed) == 1 else relayed

    def _seed(self, loss: Tensor, micro: int) -> Tensor:
        """Return what a micro-batch's loss counts of the step's: its weight over all weights."""
        weights = self.stream.weights or (1,) * self.micro_batches
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        return share_of(torch.full_like(loss, scale), weights, micro)

    def _gradients(
        self, stage: int, micro: int, roots: list[Tensor], inputs: list[Tensor], seeds: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return gradients(roots, inputs, seeds)

    def _run_again(self, stage: int, micro: int, read: Read) -> Saved:
        """Run a stage forward from what it received, with the same draws as the first time."""
        with self._drawing(micro), self._noting(stage, micro, again=True):
            result = self._twice[stage].second(read)
        return self._starting(stage, read.values, result)

    # ------------------------------------------------------------------ gradients

    def _adder(self, name: str, parameter: nn.Parameter) -> Hook:
        """Return a hook that adds up a parameter's gradient over micro-batches, in ascending order.

        autograd calls it as soon as the gradient is made, while it is still in the processor's
        cache; it keeps the zero that the hook gives back instead, so that a gradient's memory
        serves the next.
        """
        nothing = torch.zeros((), dtype=parameter.dtype, device=self.device).expand_as(parameter)

        def add(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            self._add(name, self._backward_of, self._micro, gradient)
            return nothing

        return add

    def _add(self, name: str, stage: int, micro: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter, to its bucket or to the sum here."""
        if self.replicas is None or not self.replicas.add(name, stage, micro, gradient):
            self._now.add(name, stage, gradient)

    def _looks_at_once(self) -> bool:
        """Whether a number that is not finite ends the run where it is made."""
        stops = self.on_nan == "stop" and self.loss_scale is None
        return stops and self.device.type == "cpu"  # a GPU would be waited for

    def _require_finite(self, parts: Parts = _NOTHING) -> None:
        found = self._not_finite(parts)
        if found is not None:
            raise NotFiniteError(f"{found} (device {self.name})", code="BX5005")

    def _not_finite(self, parts: Parts) -> str | None:
        stage = self.loss[0] if self.loss else None
        if self.weights is None:
            return not_finite(self.step, stage, self._now.losses, parts)
        found = not_finite(self.step, stage, self._now.losses, _NOTHING)
        for key, gradient in parts.items():
            found = found or not_finite(self.step, stage, {}, {key: gradient})
            self.weights.leave(gradient)
        return found


def _wanting(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if value.requires_grad}
