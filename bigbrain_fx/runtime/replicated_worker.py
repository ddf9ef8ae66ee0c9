"""A process that is a device of one of several replicas: others may have its state, or its work."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .held_weights import WeightsError
from .packets import StepAgainError
from .peer_states import PeerStates, can_take_from_peers
from .standing import replicas_of
from .state import StateError
from .surviving import Survivor
from .worker import KNOWS, Worker

if TYPE_CHECKING:
    from .bundle import Bundle
    from .checkpoint_options import CheckpointOptions
    from .checkpoints import Checkpoints


class ReplicatedWorker(Worker):
    """Be a device that goes on without a replica, or takes its state from its peers."""

    @staticmethod
    def about(bundle: Bundle, commits: CheckpointOptions | None) -> dict[str, Any]:
        """Return what to say of a bundle: its replicas, where a run can go on without one."""
        peers = ["peers"] if can_take_from_peers(bundle) else []
        found: list[list[str]] = []
        with suppress(WeightsError):  # whoever loads weights says it
            found = replicas_of(bundle, commits=commits is not None)
        return {"knows": [*KNOWS, *peers], **({"replicas": found} if found else {})}

    def _checkpoints(self) -> Checkpoints | None:
        about = self.bundle, self.device, self.transport, self.connecting, self.board
        self.survivor = Survivor(*about, self.commits)
        self.bundle = self.survivor.begin()
        return self.survivor.checkpoints

    def _take_state(self) -> None:
        """Put a device that takes over where all begin, by a snapshot or by its peers."""
        by_peers = self.duty.epoch >= 0 and self.control.peers
        has_peers = can_take_from_peers(self.bundle)
        if self.control.peers and not has_peers:
            raise StateError(
                "the other processes take states from peers, and this one has functions in "
                "`on_step_begin`: give all of them the same hooks, or --memory-checkpoint-every N",
                code="BX5069",
            )
        if has_peers:
            lacks = self.duty.epoch if by_peers else None
            self.transport.peers = PeerStates(self.bundle, self.device, self.control, lacks)
        if by_peers:
            self.transport.start(self.duty.epoch, {})
            self.transport.form()
        else:
            super()._take_state()

    def _writes_for(self) -> list[str]:
        return self.survivor.writes_for()

    def _kept(self) -> dict[str, Any]:
        return self.survivor.keep_last()

    def _run_step(self, step: int) -> Tensor | None:
        """Run a step, and again where fewer devices are to do it."""
        if self.transport.peers is not None:
            self.transport.peers.began = time.perf_counter()
        while True:
            self.device.updates_together = self.control.peers
            if self.control.lost and not self.control.peers and max(self.snapshots.slots) < 0:
                self.snapshots.take_now(self.device, step)  # the last replica's, which had peers
            with suppress(StepAgainError):
                return self.device.run_step(step)

    def _snapshot(self, step: int, step_s: float) -> None:
        if not self.control.peers:
            super()._snapshot(step, step_s)
