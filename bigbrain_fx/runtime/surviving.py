"""A process that is a device of one of several replicas: others may have its state, or its work.

When a replica is lost for good, the others take over its micro-batches: see `standing`. Those that
have its states write its parts of checkpoints, which all can read as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .board import last_due, miss
from .checkpoint_options import part_key, text_of
from .checkpoints import Checkpoints, checkpoints_of
from .modules import WeightsError
from .packets import StepAgainError
from .peer_states import PeerStates, can_take_from_peers
from .standing import TakingOver, replicas_of, without
from .state import State, StateError
from .state_parts import held_names, part_of_state
from .worker import KNOWS, Worker

if TYPE_CHECKING:
    from .board import Board
    from .bundle import Bundle
    from .checked_device import CheckedDevice
    from .checkpoint_options import CheckpointOptions
    from .device import Device
    from .mesh import MeshTransport
    from .replay import ReplayTransport


class InheritingCheckpoints(Checkpoints):
    """A device's part in checkpoints, and those of devices that are lost."""

    def __init__(self, *given: Any, **more: Any) -> None:  # noqa: ANN401  # as of Checkpoints
        super().__init__(*given, **more)
        self.also: dict[str, frozenset[str]] = {}  # lost devices -> what this has of their states
        self.images: dict[str, bytearray] = {}  # of them

    def go_on_with(
        self, names: Sequence[str], also: Mapping[str, frozenset[str]], finished: int
    ) -> None:
        """Be one of fewer devices, and write parts of lost ones.

        Args:
            names: of the devices.
            also: lost ones whose parts this writes -> what their states have.
            finished: steps.
        """
        led, self.names = self.leads, tuple(names)
        if self.leads and not led:
            self._lead()
        for name in also.keys() - self.also.keys():
            self._give_up(name, finished)
        self.also = dict(also)

    def _lead(self) -> None:
        """Write the records from now on; the one that is under way is nobody's."""
        self.misses.newest = self.newest()
        if self.misses.newest < self.begun:
            self.misses.miss(self.begun, "the device that writes the record was lost")

    def _give_up(self, lost: str, finished: int) -> None:
        """Miss commits under way for a device that writes its part no more."""
        for step in last_due(self, finished):
            is_begun = step <= max(self.begun, finished - 1)
            if is_begun and self.ledger.look(part_key(step, lost)) is None:
                miss(self.ledger, step, lost, f"{lost} was lost")

    def _copy(self, device: CheckedDevice, state: State) -> None:
        super()._copy(device, state)
        for name, held in self.also.items():
            part = part_of_state(state, held)
            if len(self.images.get(name, b"")) < part.nbytes:
                self.images[name] = bytearray(part.nbytes)
            part.copy_into(self.images[name])

    def _write_part(self, step: int) -> None:
        for name, image in self.images.items():  # its own part comes last: then all are there
            self.ledger.post(part_key(step, name), text_of(self.written(name, image)))
        super()._write_part(step)


Connecting = Callable[["Bundle", int, int], "MeshTransport"]  # its rank, generation


class Survivor:
    """A device that goes on with those that are left.

    Args:
        bundle: as it was emitted.
        device: this process's.
        transport: of the device.
        connecting: makes the transport of a generation.
        board: of all devices.
        commits: that were asked for.

    Attributes:
        checkpoints: of the device, if the run commits.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        transport: ReplayTransport,
        connecting: Connecting,
        board: Board,
        commits: CheckpointOptions | None,
    ) -> None:
        self.bundle, self.device, self.transport = bundle, device, transport
        self.connecting, self.board = connecting, board
        self.checkpoints: InheritingCheckpoints | None = None
        if commits is not None:
            about = bundle, device, board, commits
            self.checkpoints = checkpoints_of(InheritingCheckpoints, *about)

    def writes_for(self) -> list[str]:
        """Return the devices whose parts of commits this one writes."""
        return [self.device.name, *(self.checkpoints.also if self.checkpoints else ())]

    def begin(self) -> Bundle:
        """Begin with those that are left now; return their bundle."""
        self.transport.go_on_without = self.go_on_without
        self.transport.lost = self.transport.control.lost
        return self.go_on_without(self.transport.lost) if self.transport.lost else self.bundle

    def go_on_without(self, lost: frozenset[str]) -> Bundle:
        """Be where this step began, as one of those that are left; return their bundle."""
        left, transport, name = without(self.bundle, lost), self.transport, self.device.name
        rank, cls = next((r, cls) for r, cls in enumerate(left.devices) if cls.name == name)
        assert issubclass(cls, TakingOver)
        TakingOver.become(self.device, cls)
        transport.carry(name, cls.channels, cls.own_micro_batches())
        transport.connect = partial(self.connecting, left, rank)
        step = self.device.finished
        if transport.peers is not None:
            lacks, began = transport.peers.lacks, transport.peers.began
            transport.peers = PeerStates(left, self.device, transport.control, lacks)
            transport.peers.began = began
            step = step if lacks is None else lacks
        transport.start(step, {})
        if self.checkpoints is not None:
            lost_here = (c for c in self.bundle.devices if c.name in cls.stands_for)
            held = {c.name: held_names(c) for c in lost_here}
            self.checkpoints.go_on_with(cls.names, held, self.device.finished)
        return left

    def keep_last(self) -> dict[str, Any]:
        """Keep what is here when the supervisor that decides is lost; return what to say of it."""
        from .hosts import LastDuty  # only bundles of --with hosts have these
        from .last_commit import LastCommit

        duty = self.transport.control.last
        assert isinstance(duty, LastDuty)
        if self.checkpoints is None:
            return {"text": "the run has no --checkpoint-dir"}
        own = self.bundle, self.device, self.transport, self.checkpoints
        return LastCommit(*own, duty, self.board.deadline_s).keep()


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
