"""Messages over torch.distributed: one process per device.

Receives are posted ahead, and sends leave in the background. gloo matches messages by tag, so all
channels share one group. Other wires are in `mesh`, `gpus` (nccl) and `mpi`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel, Layout, pack as pack_as_is, stored
from .coded import MisuseError
from .compared_stream import Subject, require_same
from .gloo import ChannelEnd, GlooTransport
from .peers import LateMessageError, PeerLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def pack(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the elements to send as one dense 1-d tensor, without a copy where the layout allows.

    `layout` is the channel's; a tensor of other strides is first copied into it.

    Raises:
        MisuseError: the channel's layout repeats elements that differ in this tensor.
    """
    tensor = tensor.resolve_conj().resolve_neg()  # numbers travel, no note to turn a sign
    if Layout.of(tensor) == layout:
        return pack_as_is(tensor, layout)
    _require_room(tensor, layout)
    fresh = torch.empty_strided(
        layout.stored, _dense_strides(layout), dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(stored(tensor, layout)).as_strided((layout.numel,), (1,))


def _overlaps(layout: Layout) -> bool:
    """Whether stored elements may share memory, as the windows that `unfold` gives do."""
    reach = 0
    for step, size in sorted(zip(layout.strides, layout.stored, strict=True)):
        if size != 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _require_room(tensor: Tensor, layout: Layout) -> None:
    """Refuse a tensor whose elements are not repeated where the channel's layout repeats them."""
    repeated = any(
        planned == 0 and size > 1 and step != 0
        for planned, step, size in zip(layout.strides, tensor.stride(), layout.shape, strict=True)
    )
    if repeated or (layout.numel > 0 and not layout.is_dense and _overlaps(layout)):
        raise MisuseError(
            f"the first message had strides {layout.strides}, which repeat elements; "
            f"this one has {tuple(tensor.stride())}: make the value contiguous in the model",
            code="BX5010",
        )


def _dense_strides(layout: Layout) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in the same order as the layout's."""
    if layout.is_dense:
        return layout.strides
    strides, step = [], 1
    for size in reversed(layout.stored):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


COMPARED = 64  # digests that a device leaves in the store: none is so many steps behind another


class NetworkTransport(GlooTransport):
    """Send and receive over an initialised torch.distributed group.

    Args:
        ranks: device name -> rank.
        device: where tensors live; cuda tensors go through host memory.
        deadline_s: longest wait for any one message.
        store: where devices compare what they must agree on.
    """

    def __init__(
        self,
        ranks: dict[str, int],
        device: torch.device,
        deadline_s: float,
        store: Store | None = None,
    ) -> None:
        super().__init__(ranks, device, deadline_s)
        self.store = store
        self.said_first: deque[str] = deque()
        self.background = self._sends()

    def _sends(self) -> Background:
        return Background(self.deadline)

    def agree(self, what: Subject, digest: str, device: str) -> None:
        """Raise unless every device that names `what` gives the same digest."""
        mine = f"{device} {digest}"
        assert self.store is not None
        first = self.store.compare_set(f"agree/{what.key}", "", mine).decode()
        require_same(what, mine, first)
        if first == mine:
            self.said_first.append(f"agree/{what.key}")
        if len(self.said_first) > COMPARED:
            self.store.delete_key(self.said_first.popleft())

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Tell all devices what this one says of a step; return whether all say yes."""
        assert self.store is not None
        self.store.set(f"vote/{step}/{device}", "yes" if yes else "no")
        self.store.delete_key(f"vote/{step - 2}/{device}")  # all have voted on the next one
        return all([self.store.get(f"vote/{step}/{name}") == b"yes" for name in names])

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        self.background.drain()

    def leave(self) -> None:
        """End what carries messages, with all other processes; the group itself is the caller's."""

    def _peer(self, channel: Channel) -> int:
        return self.ranks[channel.sender] + self.ranks[channel.receiver] - self._rank()

    def _rank(self) -> int:
        return dist.get_rank()

    def _start_send(self, line: ChannelEnd, payload: Tensor, tag: int) -> None:
        with to_a_living_peer(line.channel):
            work = self._send_work(line, payload, tag)
        if work is not None:
            self.background.keep(work, payload, line.channel)

    def _start_recv(self, line: ChannelEnd, payload: Tensor, tag: int) -> Any:  # noqa: ANN401  # work
        with to_a_living_peer(line.channel):
            work = self._recv_work(line, payload, tag)
        if work is None:
            raise RuntimeError(f"this process is not part of {line.channel}")
        return work

    def _send_work(self, line: ChannelEnd, payload: Tensor, tag: int) -> Any:  # noqa: ANN401  # work
        return dist.isend(payload, line.peer, group=line.group, tag=tag)

    def _recv_work(self, line: ChannelEnd, payload: Tensor, tag: int) -> Any:  # noqa: ANN401  # work
        return dist.irecv(payload, line.peer, group=line.group, tag=tag)

    def _pack(self, tensor: Tensor, layout: Layout) -> Tensor:
        return pack(tensor, layout)

    def _wait(self, work: Any, channel: Channel) -> None:  # noqa: ANN401  # torch's or MPI's
        self.background.check()
        start, seconds = time.monotonic(), self.deadline.total_seconds()
        try:
            work.wait(self.deadline)
        except RuntimeError as error:
            if time.monotonic() - start < seconds:
                raise PeerLostError(f"the peer is gone: {channel}", code="BX5088") from error
            raise LateMessageError(
                f"no message within {seconds:g} s: {channel}", code="BX5089"
            ) from error


@contextmanager
def to_a_living_peer(channel: Channel) -> Iterator[None]:
    """Say which peer is gone where torch only says that a connection was closed."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"the peer is gone: {channel}", code="BX5090") from error


class Background:
    """Hold messages until they have left; threads wait so that the device need not.

    Messages to one peer, of one kind, leave in turn, and have a thread. A part of a sum that is
    taken late then keeps no weights here that were taken long ago.
    """

    def __init__(self, deadline: timedelta) -> None:
        self.deadline = deadline
        self.queues: dict[tuple[str, ...], SendQueue] = {}
        self.failed: tuple[Channel, BaseException] | None = None
        self._making = threading.Lock()  # messages that were lost are sent by other threads

    def keep(self, work: Any, payload: Tensor, channel: Channel) -> None:  # noqa: ANN401  # as below
        """Hold a message until it has left."""
        self.check()
        self._queue(channel).under_way.put((work, payload, channel))

    def check(self) -> None:
        """Raise where a message could not be sent."""
        if self.failed is not None:
            channel, error = self.failed
            raise PeerLostError(
                f"a message could not be sent; the peer is gone or too slow: {channel}",
                code="BX5092",
            ) from error

    def drain(self) -> None:
        """Wait until all messages have left."""
        for sends in self.queues.copy().values():
            sends.under_way.join()
        self.check()

    def _queue(self, channel: Channel) -> SendQueue:
        key = self._key(channel)
        with self._making:
            if key not in self.queues:
                name, sends = " ".join(("sends", *key)), SendQueue()
                args = (sends,)
                threading.Thread(target=self._release, args=args, daemon=True, name=name).start()
                self.queues[key] = sends  # a thread that cannot be started leaves none
            return self.queues[key]

    def _key(self, channel: Channel) -> tuple[str, ...]:
        return channel.receiver, channel.kind

    def _wait(self, work: Any) -> None:  # noqa: ANN401  # torch's or MPI's
        work.wait(self.deadline)

    def _release(self, sends: SendQueue) -> None:
        while (entry := sends.under_way.get()) is not None:
            work, payload, channel = entry
            sends.leaving = time.monotonic(), channel
            try:
                if self.failed is None:  # after a failure no message is worth another deadline
                    self._wait(work)
            except RuntimeError as error:
                self.failed = channel, error
            del entry, work, payload
            sends.leaving = None
            sends.under_way.task_done()


@dataclass
class SendQueue:
    """Messages that leave one after the other, and since when the first of them does."""

    under_way: queue.Queue[tuple[Any, Tensor, Channel] | None] = field(default_factory=queue.Queue)
    leaving: tuple[float, Channel] | None = None
