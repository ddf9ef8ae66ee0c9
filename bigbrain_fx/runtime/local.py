"""All devices of a bundle in one process: for tests, and for stepping through a bundle with pdb.

Each device is a thread, and only one of them runs at any time: it holds the hub's lock and lets go
only while it waits for a message. So events come one at a time, and the one random generator is
safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from .channel import Channel, Layout, pack, unpack

T = TypeVar("T")


class Hub:
    """The mail room of one process: a queue per channel, and a lock by which devices take turns."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self.turn = threading.Condition()
        self.queues: dict[int, deque[tuple[Layout, Tensor]]] = {}
        self.digests: dict[str, tuple[str, str]] = {}
        self.votes: dict[int, dict[str, bool]] = {}
        self.failed: BaseException | None = None

    def run(self, programs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run one function per device until all have returned; raise the first error of any."""
        results: dict[str, T] = {}
        threads = [
            threading.Thread(
                target=self._run_one, args=(name, program, results), name=name, daemon=True
            )
            for name, program in programs.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return results

    def _run_one(self, name: str, program: Callable[[], T], results: dict[str, T]) -> None:
        with self.turn:
            try:
                results[name] = program()
            except BaseException as error:
                self.failed = self.failed or error
            self.turn.notify_all()


class LocalTransport:
    """Messages between devices of one process: copied, with their strides, as over a network."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        """Nothing to post ahead: a queue takes every message."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Put a copy of the tensor in the channel's queue."""
        layout = Layout.of(tensor)
        queue = self.hub.queues.setdefault(channel.tag, deque())
        queue.append((layout, pack(tensor, layout).clone()))
        self.hub.turn.notify_all()

    def recv(self, channel: Channel) -> Tensor:
        """Wait for the channel's next message.

        Raises:
            TimeoutError: none came within the deadline; names the channel.
        """
        queue = self.hub.queues.setdefault(channel.tag, deque())
        arrived = self.hub.turn.wait_for(lambda: queue or self.hub.failed, self.hub.deadline_s)
        if self.hub.failed is not None:
            raise RuntimeError("another device of this process failed") from self.hub.failed
        if not arrived:
            raise TimeoutError(f"waited {self.hub.deadline_s:g} s for {channel}")
        layout, flat = queue.popleft()
        return unpack(flat, layout)

    def agree(self, what: str, digest: str, device: str) -> None:
        """Raise unless every device that names `what` gives the same digest."""
        other, seen = self.hub.digests.setdefault(what, (device, digest))
        if seen != digest:
            raise RuntimeError(
                f"{what} differs between devices: {other} has {seen}, {device} has {digest}"
            )

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Tell all devices what this one says of a step; return whether all say yes."""
        votes = self.hub.votes.setdefault(step, {})
        votes[device] = yes
        self.hub.votes.pop(step - 2, None)  # all have read it: they have voted on the next
        self.hub.turn.notify_all()
        self.hub.turn.wait_for(lambda: len(votes) == len(names) or self.hub.failed)
        if self.hub.failed is not None:
            raise RuntimeError("another device of this process failed") from self.hub.failed
        return all(votes.values())

    def finish(self) -> None:
        """Nothing is under way between steps."""
