"""All devices of a bundle in one process: for tests, and for stepping through a bundle with pdb.

Each device is a thread, and only one of them runs at any time. It holds the hub's lock and releases
it only while it waits for a message. Events therefore come one at a time, and the one random
generator is safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import TypeVar

import torch
from torch import Tensor

from .channel import Channel, Layout, unpack
from .coded import MisuseError
from .compared_stream import Subject, require_same
from .limits import require_threads
from .network import pack

T = TypeVar("T")
COMPARED = 64  # digests that are kept: no device is so many steps behind another


class Hub:
    """Messages of one process: a queue per channel, and a lock by which devices take turns.

    There is no deadline: one may sit in a debugger for as long as one likes. If all devices wait,
    no device is left to send anything, and that is an error.

    threads: CPU threads that each device computes with, as in a process of its own: kernels add in
    another order with another number. A device that is not named takes what it finds.
    """

    def __init__(self, threads: Mapping[str, int] | None = None) -> None:
        self.turn = threading.Condition()
        self.threads = threads or {}
        self.running = 0
        self.waiting: dict[int, Callable[[], object]] = {}
        self.queues: dict[int, deque[tuple[Layout, Tensor]]] = {}
        self.digests: dict[str, str] = {}
        self.votes: dict[int, dict[str, bool]] = {}
        self.failed: BaseException | None = None

    def run(self, programs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run one function per device until all have returned; raise the first error of any.

        Each has a copy of the caller's context: of decimal, of NumPy's errors, the user's own. In a
        process of its own, which has run the user's file, it would have the same.
        One device alone runs in the caller's thread, which has what the file sets of a thread.
        """
        if len(programs) == 1:
            return {name: self._alone(name, program) for name, program in programs.items()}
        require_threads(len(programs))
        results: dict[str, T] = {}
        self.running = len(programs)
        threads = [
            threading.Thread(
                target=copy_context().run,
                args=(self._run_one, name, program, results),
                name=name,
                daemon=True,
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

    def _alone(self, name: str, program: Callable[[], T]) -> T:
        count = self.threads.get(name)
        if count is not None and count != torch.get_num_threads():
            torch.set_num_threads(count)
        self.running = 1
        with self.turn:
            return program()

    def _run_one(self, name: str, program: Callable[[], T], results: dict[str, T]) -> None:
        with self.turn:
            try:
                self._use_threads()
                results[name] = program()
            except BaseException as error:
                self.failed = self.failed or error
            self.running -= 1
            self.turn.notify_all()

    def wait(self, is_there: Callable[[], object], what: str) -> None:
        """Let others run until something is there; the caller holds `turn`.

        Raises:
            MisuseError: another device failed, or all wait: for `what`, this one.
        """
        me = threading.get_ident()
        self.waiting[me] = is_there
        self.turn.notify_all()  # this may have been the last that could send
        self.turn.wait_for(lambda: is_there() or self.failed or self._is_stuck())
        self._use_threads()
        is_stuck = not is_there() and self._is_stuck()
        del self.waiting[me]
        if self.failed is not None:
            raise MisuseError(
                "another device of this process failed", code="BX5067"
            ) from self.failed
        if is_stuck:
            raise MisuseError(
                f"nobody is left to send: this device waits for {what}", code="BX5068"
            )

    def _use_threads(self) -> None:
        """Compute with this device's number: the last device's turn may have left another."""
        count = self.threads.get(threading.current_thread().name)
        if count is not None and count != torch.get_num_threads():
            torch.set_num_threads(count)

    def _is_stuck(self) -> bool:
        return len(self.waiting) >= self.running and not any(
            is_there() for is_there in self.waiting.values()
        )


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
            MisuseError: another device failed, or none is left to send one; names the channel.
        """
        queue = self.hub.queues.setdefault(channel.tag, deque())
        if not queue:
            self.hub.wait(lambda: queue, str(channel))
        layout, flat = queue.popleft()
        return unpack(flat, layout)

    def agree(self, what: Subject, digest: str, device: str) -> None:
        """Raise unless every device that names `what` gives the same digest."""
        mine = f"{device} {digest}"
        require_same(what, mine, self.hub.digests.setdefault(what.key, mine))
        while len(self.hub.digests) > COMPARED:
            del self.hub.digests[next(iter(self.hub.digests))]

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Tell all devices what this one says of a step; return whether all say yes."""
        votes = self.hub.votes.setdefault(step, {})
        votes[device] = yes
        self.hub.votes.pop(step - 2, None)  # all have read it: they have voted on the next
        self.hub.turn.notify_all()
        if len(votes) < len(names):
            self.hub.wait(lambda: len(votes) == len(names), f"votes on step {step}")
        return all(votes.values())

    def finish(self) -> None:
        """Nothing is under way between steps."""
