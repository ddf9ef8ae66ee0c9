"""What changes in a device's process when a replica is lost for good; `standing` says to what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .checkpoints import checkpoints_of
from .inheriting import InheritingCheckpoints
from .peer_states import PeerStates
from .standing import TakingOver, without
from .state_parts import held_names

if TYPE_CHECKING:
    from .board import Board
    from .bundle import Bundle
    from .checkpoint_options import CheckpointOptions
    from .device import Device
    from .mesh import MeshTransport
    from .replay import ReplayTransport

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
