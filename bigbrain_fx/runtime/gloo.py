"""Messages over gloo, which matches them by tag: receives are posted ahead, sends leave aside."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import HEADER_LENGTH, Channel, Layout, pack, unpack

AHEAD = 2  # receives posted per channel: one being used, one arriving


@dataclass
class ChannelEnd:
    """The state of one channel at one end."""

    channel: Channel
    peer: int
    group: dist.ProcessGroup | None = None
    layout: Layout | None = None
    header: tuple[Tensor, Any] | None = None
    posted: deque[tuple[Tensor, Any]] = field(default_factory=deque)
    expected: int = 0


class GlooTransport:
    """Send and receive over an initialised torch.distributed group; `ranks` are by device name."""

    def __init__(self, ranks: dict[str, int], device: torch.device, deadline_s: float) -> None:
        self.ranks = ranks
        self.device = device
        self.deadline = timedelta(seconds=deadline_s)
        self.wire = torch.device("cpu")  # where messages are
        self.ahead = AHEAD
        self.lines: dict[int, ChannelEnd] = {}
        self.leaving: list[tuple[Any, Tensor]] = []  # what is sent has memory until `finish`

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        """Say how many messages each incoming channel will bring; post the first receives."""
        for channel, count in channels:
            line = self._line(channel)
            line.expected += count
            self._post(line, self._ahead(line))

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Start sending; the tensor must not be written to afterwards."""
        tensor = tensor.resolve_conj().resolve_neg()  # numbers travel, no note to turn a sign
        layout = self._line(channel).layout or Layout.of(tensor)
        self.send_bytes(channel, layout, self._bytes(self._pack(tensor, layout).to(self.wire)))

    def send_bytes(self, channel: Channel, layout: Layout, payload: Tensor) -> None:
        """Start sending what `_bytes` made; the channel's first message says the layout of all."""
        line = self._line(channel)
        if line.layout is None:
            line.layout = layout
            self._start_send(line, self._bytes(layout.header()).to(self.wire), 2 * channel.tag)
        self._start_send(line, payload, 2 * channel.tag + 1)

    def recv(self, channel: Channel) -> Tensor:
        """Wait for the channel's next message."""
        line = self._line(channel)
        if line.layout is None:
            line.layout = self._read_header(line)
        self._post(line, max(1, self._ahead(line)))
        arriving, work = line.posted.popleft()
        self._wait(work, channel)
        self._post(line, self._ahead(line))
        flat = self._opened(arriving, line.layout.numel, channel.wire[1], channel)
        return unpack(flat.to(self.device), line.layout)

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        for work, _ in self.leaving:
            work.wait(self.deadline)
        self.leaving.clear()

    def _ahead(self, line: ChannelEnd) -> int:
        return 0 if line.channel.on_demand else self.ahead

    def _line(self, channel: Channel) -> ChannelEnd:
        if channel.tag not in self.lines:
            self.lines[channel.tag] = ChannelEnd(channel, self._peer(channel))
        return self.lines[channel.tag]

    def _peer(self, channel: Channel) -> int:
        return self.ranks[channel.sender] + self.ranks[channel.receiver] - dist.get_rank()

    def _start_send(self, line: ChannelEnd, payload: Tensor, tag: int) -> None:
        work = dist.isend(payload, line.peer, group=line.group, tag=tag)
        self.leaving.append((work, payload))

    def _start_recv(self, line: ChannelEnd, payload: Tensor, tag: int) -> Any:  # noqa: ANN401  # work
        return dist.irecv(payload, line.peer, group=line.group, tag=tag)

    def _post(self, line: ChannelEnd, count: int) -> None:
        """Keep up to `count` receives posted; before the layout is known, the header's only."""
        if line.layout is None:
            if count and line.header is None and line.expected:
                header = self._room(HEADER_LENGTH, torch.int64)
                line.header = header, self._start_recv(line, header, 2 * line.channel.tag)
            return
        while line.expected and len(line.posted) < count:
            arriving = self._room(line.layout.numel, line.channel.wire[1])
            work = self._start_recv(line, arriving, 2 * line.channel.tag + 1)
            line.posted.append((arriving, work))
            line.expected -= 1

    def _read_header(self, line: ChannelEnd) -> Layout:
        self._post(line, 1)
        if line.header is None:
            raise RuntimeError(f"no message is due on {line.channel}")
        arriving, work = line.header
        self._wait(work, line.channel)
        header = self._opened(arriving, HEADER_LENGTH, torch.int64, line.channel)
        found, (planned, _) = Layout.from_header(header), line.channel.wire
        if found.shape != planned:
            raise ValueError(f"{line.channel}: planned shape {planned}, sent {found.shape}")
        return found

    def _pack(self, tensor: Tensor, layout: Layout) -> Tensor:
        return pack(tensor, layout)

    def _bytes(self, flat: Tensor) -> Tensor:
        return flat.view(torch.uint8)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=self.wire)

    def _opened(self, arrived: Tensor, numel: int, dtype: torch.dtype, channel: Channel) -> Tensor:
        return arrived.view(dtype)

    def _wait(self, work: Any, channel: Channel) -> None:  # noqa: ANN401  # torch's or MPI's
        try:
            work.wait(self.deadline)
        except RuntimeError as error:
            raise ConnectionError(f"the peer is gone, or too slow: {channel}") from error
