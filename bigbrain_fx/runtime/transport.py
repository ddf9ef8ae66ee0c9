"""How messages travel, as a device sees it: over a network, or within one process."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .channel import Channel


class Transport(Protocol):
    """How messages travel between devices."""

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        """Expect so many messages on each incoming channel."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Start sending."""

    def recv(self, channel: Channel) -> Tensor:
        """Wait for the next message."""

    def agree(self, what: str, digest: str, device: str) -> None:
        """Compare a digest with the other devices'; `finish` may be what raises."""

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Tell all devices, `names`, what this one says of a step; return whether all say yes."""
        ...

    def finish(self) -> None:
        """Wait until all sends have left."""
