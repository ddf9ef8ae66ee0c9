"""Processes that compute on GPUs: which GPU is whose, and messages over nccl.

nccl has no tags: every channel gets a group of its own, which keeps its order and lets channels
pass each other. Its messages are kernels, each on the stream of its channel, and the stream that
computes waits for receives only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .channel import Channel
from .coded import InputError
from .gloo import AHEAD, ChannelEnd
from .limits import SHARE_GPUS
from .network import Background, NetworkTransport, SendQueue, to_a_living_peer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class NcclTransport(NetworkTransport):
    """Send and receive over nccl, between GPUs of their own.

    Args:
        ranks, device, deadline_s, store: as of a NetworkTransport; see `_wait` for the deadline.
        channels: those of all devices. Each gets its group at once, in order of tags: torch numbers
            groups, so every device must make all of them, in one order.
    """

    def __init__(
        self,
        ranks: dict[str, int],
        device: torch.device,
        deadline_s: float,
        store: Store | None = None,
        channels: Iterable[Channel] = (),
    ) -> None:
        self.wire = device
        super().__init__(ranks, device, deadline_s, store)
        self.wire, self.ahead = device, 0  # a receive of nccl would spin on the GPU
        self.reached: deque[torch.cuda.Event] = deque()
        for _, channel in sorted({channel.tag: channel for channel in channels}.items()):
            self._connect(channel)

    def _sends(self) -> Background:
        return GpuBackground(self.deadline, self.device)

    def _line(self, channel: Channel) -> ChannelEnd:
        if channel.tag not in self.lines:
            raise RuntimeError(f"no group was made for {channel}")
        return self.lines[channel.tag]

    def _connect(self, channel: Channel) -> None:
        """Give a channel a group of its own; pass a first message if it starts or ends here.

        nccl connects two ends in their first message, and each waits there for the other. In a step
        it would be too late: two ends that both send first would wait for ever.
        """
        sender, receiver = self.ranks[channel.sender], self.ranks[channel.receiver]
        group = dist.new_group([sender, receiver], timeout=self.deadline)
        if (me := dist.get_rank()) not in (sender, receiver):
            return
        line = self.lines[channel.tag] = ChannelEnd(channel, self._peer(channel), group)
        move = dist.send if me == sender else dist.recv
        with to_a_living_peer(channel):
            move(torch.zeros(1, device=self.wire), line.peer, group=group)

    def _wait(self, work: Any, channel: Channel) -> None:  # noqa: ANN401  # torch's
        """Let the stream that computes wait for a message over nccl; this thread goes on.

        No timeout is given: with one, nccl's `wait` polls here until the message has come. At the
        group's, which is the deadline, or when nccl sees that a peer is gone, torch's watchdog ends
        the process by SIGABRT; its text is in the log, ours is not
        (TORCH_NCCL_ASYNC_ERROR_HANDLING).

        This thread stays AHEAD messages ahead at most: what it sends has memory until it has left.
        """
        self.background.check()
        with to_a_living_peer(channel):
            work.wait()
        if self.wire.type != "cuda":
            return
        self.reached.append(torch.cuda.Event(blocking=True))
        self.reached[-1].record()
        if len(self.reached) > AHEAD:
            self.reached.popleft().synchronize()


class GpuBackground(Background):
    """Hold what is being sent over nccl until it has left.

    nccl's `wait` makes the thread's current stream wait, which by default is the computing one.
    Computing would wait for every send, and two devices that send to each other for ever. All
    messages have one thread with a stream of its own.
    """

    def __init__(self, deadline: timedelta, wire: torch.device) -> None:
        super().__init__(deadline)
        # with a priority, so as not to be one of those that the channels have: torch hands out 32
        self.side = torch.cuda.Stream(wire, priority=-1) if wire.type == "cuda" else None

    def _key(self, channel: Channel) -> tuple[str, ...]:
        return ()

    def _wait(self, work: Any) -> None:  # noqa: ANN401  # torch's
        if self.side is None:
            work.wait(self.deadline)
            return
        work.wait()  # see `NcclTransport._wait`
        left = torch.cuda.Event(blocking=True)  # sleeps; to wait for a stream is to spin
        left.record()
        left.synchronize()

    def _release(self, sends: SendQueue) -> None:
        if self.side is not None:
            torch.cuda.set_stream(self.side)  # of this thread, and its GPU
        super()._release(sends)


def require_own_gpu(kinds: Sequence[str], rank: int, local_rank: int) -> None:
    """Refuse before anything is connected: torch's own words for it are its frames.

    Raises:
        InputError: this process's GPU is not there.
    """
    number = own_gpu(kinds, rank, local_rank)
    found = _gpus()
    if number < found:
        return
    built = "" if torch.version.cuda else f", and torch {torch.__version__} is built without CUDA"
    raise InputError(
        f"this plan wants a GPU number {number} on this host, which has {found} GPUs{built}: "
        "--in-process computes it on the CPU; or split for what `bigbrain-fx doctor` finds here"
        + (f"; or set {SHARE_GPUS}=1: processes share a GPU then, over gloo" if found else ""),
        code="BX5128",
    )


def prepare_cuda(kinds: Sequence[str]) -> None:
    """Let kernels run beside the messages of nccl, which are kernels themselves.

    CUDA reads the environment as it starts. The user's settings stay.
    """
    if len(kinds) == 1 or set(kinds) != {"cuda"}:
        return
    # A kernel that is loaded at its first call may wait for all that run (CUDA's guide, "Lazy
    # Loading"); a message runs until its other end is there, which may need that kernel's result.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Each channel has a stream. Streams share 8 queues unless more are asked for, 32 at most, and
    # what is queued behind a message that waits does not start.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def own_cuda(kinds: Sequence[str], rank: int, local_rank: int) -> torch.device:
    """Return where this process computes; see `own_gpu`."""
    prepare_cuda(kinds)
    device = torch.device("cuda", own_gpu(kinds, rank, local_rank))
    torch.cuda.set_device(device)
    return device


def own_gpu(kinds: Sequence[str], rank: int, local_rank: int) -> int:
    """Return the number of a process's GPU: how many GPU processes of its host come before it.

    LOCAL_RANK counts CPU processes, too. Processes of a host are assumed to have consecutive ranks,
    as launchers give them. If the user lets processes share GPUs, they take GPUs in turn.
    """
    number = list(kinds[max(0, rank - local_rank) : rank]).count("cuda")
    return number % max(1, _gpus()) if SHARE_GPUS in os.environ else number


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
