"""One device in training: what the emitted `step_once()` calls, one method per kind of instruction.

The emitted file decides what happens when; this file only does it. It knows no schedule.

    recv ──▶ forward ──▶ send      activations, to later stages
    send ◀── backward ◀── recv     gradients, to earlier stages; summed over micro-batches
    tied gradients, norms ──▶ optimizer_step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .backward_device import BackwardDevice
from .channel import Channel
from .data import Stream
from .finite import NotFiniteError
from .gradients import Parts, clipped
from .loss_scale import LEAST, LossScale
from .malloc import apart
from .modules import Stage, release
from .rates import LearningRates
from .recipe import Optimizer, Training
from .step_sums import StepSums
from .transport import Transport
from .weights import fill

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .asynchronous import Versions
    from .buckets import Listed
    from .opaque_state import ObjectStates
    from .stores import StoredState, StoreRoom

_NOTHING: Parts = MappingProxyType({})
_NOTHING_LOADED: Mapping[str, Tensor] = MappingProxyType({})


class Device(BackwardDevice):
    """Run one device's part of every training step.

    Attributes:
        sum_order, zero_stage: how replicas add gradients, and what they divide; see `replicas`.
        offload: what it keeps in its store; empty: nothing. See `stores`.
        store: the folder of the store; None: its host's memory.
        store_bytes: what is planned to lie there.
        empties_every: where steps run into each other and processes are replaced, each so-many-th
            ends with nothing under way: a state is of such a step's end.
        begins_empty: the next step begins so.
        stands_for: lost devices, whose files it writes: it holds all that they held.
    """

    sum_order = "replica"
    zero_stage = 0
    offload: tuple[str, ...] = ()
    store: str | None = None
    store_bytes = 0
    empties_every = 1
    begins_empty = True
    stands_for: tuple[str, ...] = ()

    def __init__(
        self, transport: Transport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.updates_together = False  # not before all have all of a step's messages
        self.updated: dict[str, nn.Parameter] = {}  # those that this device's optimizer has
        self.first_gradients: dict[str, Tensor] | None = None
        self.room: StoreRoom | None = None
        self.stored: StoredState | None = None
        self.versions: Versions | None = None
        self.objects: ObjectStates | None = None  # of the user's, where no stage is traced
        self.goes_on_after: Callable[[int], bool] = lambda _step: False  # into the next batch

    def _made(self, stage: type[Stage]) -> Stage:
        is_stored = "weights" in self.offload  # see `load`
        with apart() if is_stored else nullcontext():
            module = super()._made(stage)
            if self.zero_stage == 3 or is_stored:  # others keep most of them: see `join`
                named = module.parameters()
                release(p for p in named if p.requires_grad or is_stored)
        return module

    # ------------------------------------------------------------------ set-up

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights, by their names in the model; with ZeRO 3 `join` does.

        `owner` lists every trained parameter of the whole model, in its order, and the device that
        answers for its norm.

        Raises:
            WeightsError: a tensor is missing or has another shape, or `owner` is not of them.
        """
        super().load(tensors, owner)
        self.held.require_owners()
        for name, parameter in self.parameters.items():
            parameter.register_hook(self._adder(name, parameter))

    def _fill(self, number: int, module: Stage, tensors: Mapping[str, Tensor]) -> None:
        if self.weights is not None:
            self.held.share(number, module)
            self.weights.fill(number, module, tensors)
            return
        fill(module, tensors, self.held.left_out(module) if self.zero_stage == 3 else set())
        self.held.share(number, module)

    def join(self, listed: Listed, tensors: Mapping[str, Tensor] = _NOTHING_LOADED) -> None:
        """Sum gradients with other replicas: `listed` is what buckets.json says.

        With ZeRO 3, take from `tensors` the weights that this replica keeps.

        Raises:
            WeightsError: it names parameters or buffers that this device does not hold.
        """
        from .joining import replicas_of, statistics_of, unsharded_of  # bundles with replicas

        self.replicas = replicas_of(self, listed)
        self.statistics = statistics_of(self, listed)
        if self.zero_stage == 3:
            self.unsharded = unsharded_of(self, self.replicas, listed, tensors)

    def train_with(self, training: Training) -> None:
        """Make the optimizer for this device's parameters, in the order of the model."""
        self.training = training
        self.updated = {n: p for n, p in self._masters().items() if self._updates(n)}
        named = list(self.updated.items())
        self.optimizer = training.optimizer(named) if named else None
        scaling = training.grad_scaler
        self.loss_scale = None if scaling is None else LossScale(**scaling)
        self.rates = LearningRates(self.optimizer, training.lr_scale, training.scheduler)

    def _masters(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer updates, by name."""
        return self.parameters

    def open_store(self, folder: str | None) -> None:
        """Open the store, before weights are loaded, which may lie there; None: the planned one.

        Raises:
            StoreError: it cannot be used, or lacks the room.
        """
        from .stores import room_of  # only bundles that offload have it

        where = None if self.store is None else folder or self.store
        self.room = room_of(where, self.name, self.store_bytes)
        if "weights" in self.offload:
            from .stored_weights import StoredWeights  # only bundles that offload them

            self.weights = StoredWeights(self.room)

    def offload_to(self, folder: str | None) -> None:
        """Let what else is offloaded lie in the device's store, which is opened if need be.

        Raises:
            StoreError: it cannot be used, or lacks the room.
        """
        from .stores import StoredState  # only bundles that offload have it

        if self.room is None:
            self.open_store(folder)
        assert self.room is not None
        if self.optimizer is not None and "state" in self.offload:
            self.stored = StoredState(self.optimizer, self.room, self.weights)
        if self.saving:
            from .stored_activations import ActivationStore  # only bundles that offload them

            self.saved = ActivationStore(self.room)

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

    def _begin(self) -> None:
        self._now = StepSums(self.held)
        self.first_gradients = None  # for `verify`; as large as the weights, so not kept for long
        if self.replicas is not None:
            self.replicas.begin()
        if self.statistics is not None:
            self.statistics.begin()

    def _run(self) -> None:
        if self.unsharded is not None:
            self.unsharded.begin()
        if self.weights is not None:
            self.weights.let_go_of_all()  # who copied the state has read them all
        super()._run()
        is_tied = any(channel.kind == "tied" for channel in self.channels)
        if self.members or is_tied or self.replicas is not None:
            from .copies import require_equal_copies  # only bundles with copies of a weight have it

            require_equal_copies(self)

    @classmethod
    def messaging(cls) -> tuple[Channel, ...]:
        """Return the channels between processes: those of sums carry nothing where torch adds."""
        summed = ("reduce", "gather") if cls.sum_order == "backend" else ()
        return tuple(channel for channel in super().messaging() if channel.kind not in summed)

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
        self._send(channel, self._now.own_norms(self.loss_scale, self.weights))

    def recv_norms(self, channel: Channel) -> None:
        """Take the norms of the gradients that another device answers for."""
        self._now.take_norms(channel.sender, self._receive(channel))

    def optimizer_step(self) -> None:
        """Sum tied gradients, last stage first; clip by the global norm; update the parameters.

        Nothing is updated where a number is not finite and the policy is to skip.

        Raises:
            NotFiniteError: a loss or a gradient is not finite, and the policy is to stop.
        """
        if self.weights is not None:
            self.weights.visit(None, self._now.gradients)
        if self._may_update() and self.optimizer is not None:
            self._update(self.optimizer)
        if self.statistics is not None:
            self.statistics.end()
        self._now.clear()
        self._advance_rates()

    def _advance_rates(self) -> None:
        self.rates.advance()

    def _update(self, optimizer: Optimizer) -> None:
        found = self._summed()
        limit = self.training.clip_norm
        if limit is not None and self.weights is not None:
            self.weights.clip(found, self._norms(), limit)
        elif limit is not None:
            found = clipped(found, self._norms(), limit)
        if self.step == 0:
            self.first_gradients = {self.held.divided.get(n, n): g for n, g in found.items()}
        for name, parameter in self.updated.items():
            parameter.grad = found.get(name)
        self.rates.set(self.step)
        optimizer.step() if self.stored is None else self.stored.step()
        optimizer.zero_grad(set_to_none=True)

    def _may_update(self) -> bool:
        """Whether all numbers of this step are finite, or nobody minds."""
        if self.loss_scale is not None:
            return self._may_update_scaled(self.loss_scale)
        fine = True
        if self.on_nan == "skip":
            fine = self._not_finite(self._now.gradients) is None
        elif self.on_nan == "stop":
            self._require_finite(self._now.gradients)
        if self.on_nan == "skip" or self.updates_together:
            return self.transport.vote(self.step, self.name, fine, self.names)
        return True

    def _may_update_scaled(self, scale: LossScale) -> bool:
        """Whether all devices have finite gradients; else the scale falls."""
        self._summed()
        fine = self.transport.vote(self.step, self.name, self._now.finite, self.names)
        scale.update(fine)
        if not fine and scale.scale < LEAST and self.on_nan == "stop":
            raise NotFiniteError(
                f"step {self.step}: the loss or a gradient is not finite, and the loss scale has "
                f"fallen to {scale.scale:g} for it (device {self.name})",
                code="BX5036",
            )
        return fine

    def _summed(self) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        return self._now.summed(self.loss_scale, self.weights)

    def _norms(self) -> list[Tensor]:
        """Return the norms of all gradients of the model, in its order."""
        if not self._now.norms:
            self._now.own_norms(self.loss_scale, self.weights)
        return self._now.all_norms()
