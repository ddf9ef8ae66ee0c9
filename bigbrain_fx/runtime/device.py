"""One device in training, of any plan: replicas, offloading, recomputation.

Bundles of a plain pipeline have `checked_device` instead; here stands what a plan may add to it.
The emitted file decides on the order of computations; this file only runs them. The module knows no
schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .channel import Channel
from .checked_device import CheckedDevice, Parts
from .compared_stream import AgreeingTransport
from .data import Stream
from .feature import Compute
from .finite import not_finite
from .modules import Stage, fill
from .pipeline_device import Saved
from .planned_device import PlannedDevice
from .planned_sums import PlannedSums, nothing_of, share_of
from .recipe import Optimizer, Training
from .released import is_released, left_out, release

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .stored_activations import ActivationStore
    from .stores import StoreRoom
    from .unsharded import Unsharded


class Device(PlannedDevice, CheckedDevice):
    """Run one device's part of every training step.

    Attributes:
        recompute: stages that run forward again before each backward, and keep only what they
            received until then.
        saving: stages of which what the forward saves lies in its store. See `stored_activations`.
        sum_order, zero_stage: how replicas add gradients, and what they divide; see `replicas`.
        offload: what it keeps in its store; empty: nothing. See `stores`.
        store: the folder of the store; None: its host's memory.
        store_bytes: what is planned to lie there.
    """

    recompute: tuple[int, ...] = ()
    saving: tuple[int, ...] = ()
    sum_order = "replica"
    store: str | None = None
    store_bytes = 0
    _now: PlannedSums
    stream: Stream

    def __init__(
        self, transport: AgreeingTransport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        self.unsharded: Unsharded | None = None
        self.saved: ActivationStore | None = None
        self.room: StoreRoom | None = None
        super().__init__(transport, stream, seed, device)
        if self.recompute:
            from .recompute import RecomputedStages  # only bundles of --recompute have it

            self.add(RecomputedStages())
        if stream.drop_last is False:
            from .recompute import UnevenRows  # only bundles of drop_last = False have it

            self.add(UnevenRows())

    def _empty(self, stage: type[Stage]) -> Stage:
        is_stored = "weights" in self.offload  # see `stores.open_store`
        if is_stored:
            from .offload_malloc import apart  # only bundles that offload have it
        with apart() if is_stored else nullcontext():
            module = super()._empty(stage)
            if self.zero_stage == 3 or is_stored:  # others keep most of them: see `joining`
                named = module.parameters()
                release(p for p in named if p.requires_grad or is_stored)
        return module

    def _fill(self, number: int, module: Stage, tensors: Mapping[str, Tensor]) -> None:
        if self.weights is not None:
            self.held.share(number, module)
            self.weights.fill(number, module, tensors)
        elif self.zero_stage == 3:
            fill(module, tensors, left_out(self.held, module))
            self.held.share(number, module)
        else:
            super()._fill(number, module, tensors)

    def state(self) -> dict[str, Tensor]:
        """Return this device's tensors by their names in the model; with ZeRO 3 those it keeps."""
        return {name: t for name, t in super().state().items() if self.holds(t)}

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has its numbers here: other replicas, or a store, may have them."""
        return not is_released(tensor)

    def train_with(self, training: Training) -> None:
        """Make the optimizer for this device's parameters, in the order of the model."""
        super().train_with(training)
        if training.grad_scaler is not None:
            from .loss_scale import LossScale, ScaledLoss  # only bundles with a loss scale have it

            if self.loss_scale is None:
                self.add(ScaledLoss())
            self.loss_scale = LossScale(**training.grad_scaler)

    def _to_update(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._masters().items() if self._updates(name)}

    def _masters(self) -> dict[str, nn.Parameter]:
        """Return what the optimizers of all replicas update, by name."""
        return self.parameters

    def room_for_state(self, nbytes: int) -> Any:  # noqa: ANN401  # what has bytes
        """Return room for a copy of the state: where the state is kept, so is its copy."""
        if self.room is None or (self.stored is None and self.weights is None):
            return bytearray(nbytes)
        return self.room.buffer(nbytes)

    def _updates(self, name: str) -> bool:
        """Whether this device's optimizer updates a parameter: with ZeRO one replica's does."""
        if not self.zero_stage or self.replicas is None:
            return True
        return self.replicas.updated_here(name)

    # ------------------------------------------------------------------ a step

    def _sums(self) -> PlannedSums:
        return PlannedSums(self.held, stored=self.weights, on_sums=self.features["on_sums"])

    def _run(self) -> None:
        for begin_run in self.features["begin_run"]:
            begin_run()
        super()._run()

    def loss_now(self) -> Tensor | None:
        """Return this step's loss, as far as it is computed, where it is reported."""
        self._now.weights = self.stream.weights
        return super().loss_now() if self._reports() else None

    def _reports(self) -> bool:
        """Whether the losses made here are those to report: others have the same, or their own."""
        stage = self.loss[0] if self.loss else -1
        replica = self.replica_of_stage.get(stage, self.replica)
        return not replica and self.name in (self.members or (self.name,))[:1]

    def give_up_step(self) -> None:
        """Be as this step began, which nobody has updated in: it is begun again."""
        super().give_up_step()
        if self.group is not None:
            self.group.waiting.clear()
        if self.statistics is not None:
            self.statistics.take_back()

    @classmethod
    def messaging(cls) -> tuple[Channel, ...]:
        """Return the channels between processes: those of sums carry nothing where torch adds."""
        summed = ("reduce", "gather") if cls.sum_order == "backend" else ()
        return tuple(channel for channel in super().messaging() if channel.kind not in summed)

    # ------------------------------------------------------------------ instructions

    # What is returned is known per stage only: one tensor as it is, several as a tuple.

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401  # above
        """Run a stage forward; remember what its backward needs."""
        with self._running(stage, micro, "forward"):
            return super().forward(stage, micro, **values)

    def _compute(self, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        run: Compute = super()._compute
        for compute in self.features["compute"]:
            run = partial(compute, run)
        return run(stage, micro, values)

    def backward(self, stage: int, micro: int, /, **sent: Tensor | None) -> Any:  # noqa: ANN401
        """Run a stage backward; see `PipelineDevice.backward`. Missing gradients stay missing."""
        with self._running(stage, micro, "backward"):
            return super().backward(stage, micro, **sent)

    def _root(self, root: Tensor, gradient: Tensor | None) -> Tensor:
        return nothing_of(root) if gradient is None else root

    def _add(self, name: str, stage: int, micro: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter, to its bucket or to the sum here."""
        takers = self.features["on_gradient"]
        if not any(taker(name, stage, micro, gradient) for taker in takers):
            super()._add(name, stage, micro, gradient)

    def _start_of(self, stage: int, micro: int) -> Saved:
        kept: Any = super()._start_of(stage, micro)
        for restore in reversed(self.features["restore"]):
            kept = restore(stage, micro, kept)
        return cast(Saved, kept)

    def _seed(self, loss: Tensor, micro: int) -> Tensor:
        """Return what a micro-batch's loss counts of the step's: its weight over all weights."""
        weights = self.stream.weights or (1,) * self.micro_batches
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        return share_of(torch.full_like(loss, scale), weights, micro)

    # ------------------------------------------------------------------ replicas

    def reduce_gradients(self, stage: int, micro: int, *, deferred: bool = False) -> None:
        """After a stage's backward: send what is complete to the replicas that sum it.

        `deferred`: after its `backward_weight`.
        """
        assert self.replicas is not None
        self.replicas.after(stage, micro, waited=deferred)
        if self.unsharded is not None:
            self.unsharded.take_parts()

    def sum_gradients(self) -> None:
        """Sum gradients over all replicas; without ZeRO, all of them have all sums then."""
        assert self.replicas is not None
        self.replicas.sum()
        if not self.zero_stage:
            self.replicas.send_sums()
            self.replicas.recv_sums()
        self._now.gradients.update(self.replicas.gradients(bool(self.zero_stage)))

    def exchange_statistics(self) -> None:
        """Write what the micro-batches of all replicas add to running statistics, in order."""
        assert self.statistics is not None
        self.statistics.tell()
        self.statistics.take([m for m, rows in enumerate(self.stream.sizes) if not rows])

    def gather_weights(self) -> None:
        """Exchange what each replica has updated."""
        assert self.replicas is not None
        self.replicas.send_weights()
        self.replicas.recv_weights()

    def send_losses(self, channel: Channel) -> None:
        """Send this replica's losses to the first one, which reports their mean."""
        losses = self._now.losses
        self._send(channel, torch.stack([losses[micro] for micro in sorted(losses)]))

    def recv_losses(self, channel: Channel, replica: int) -> None:
        """Take the losses of another replica."""
        found = self._receive(channel).unbind()
        self._now.losses.update(zip(self.micros[replica], found, strict=True))

    # ------------------------------------------------------------------ once a step

    def optimizer_step(self) -> None:
        """Update the parameters; see `CheckedDevice.optimizer_step`."""
        if self.weights is not None:
            self.weights.visit(None, self._now.gradients)
        super().optimizer_step()
        for after_update in self.features["after_update"]:
            after_update()

    def _may_update(self) -> bool:
        for may_update in self.features["may_update"]:
            return bool(may_update())
        return super()._may_update()

    def _clipped(self, found: dict[str, Tensor], limit: float | None) -> dict[str, Tensor]:
        if limit is None or self.weights is None:
            return super()._clipped(found, limit)
        self.weights.clip(found, self._now.all_norms(), limit)
        return super()._clipped(found, None)

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step() if self.stored is None else self.stored.step()

    def _not_finite(self, parts: Parts) -> str | None:
        if self.weights is None:
            return super()._not_finite(parts)
        found = super()._not_finite({})
        stage = self.loss[0] if self.loss else None
        for key, gradient in parts.items():
            found = found or not_finite(self.step, stage, {}, {key: gradient})
            self.weights.leave(gradient)
        return found
