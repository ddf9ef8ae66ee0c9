"""What two devices say of one thing -> nothing, or in words how it differs and what to do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .channel import Transport
from .coded import InputError
from .stream import BatchError


class Subject(NamedTuple):
    """What devices compare: the batch of a step, or their copies `of` weights after it."""

    step: int
    of: str = ""

    @property
    def key(self) -> str:
        """The name under which they do; a supervisor reads kind and step of it."""
        return f"copies/{self.step}/{self.of}" if self.of else f"batch/{self.step}"

    def __str__(self) -> str:
        """Say it in words."""
        after = f"the copies of {self.of} after step {self.step}"
        return after if self.of else f"the batch of step {self.step}"


class CopiesError(InputError, RuntimeError):
    """Report that devices hold other numbers of one weight, which each of them updates."""


def require_same(what: Subject, mine: str, first: str) -> None:
    """Refuse what is another one than what somebody has said before.

    Args:
        what: is compared.
        mine: who says it now, and its digest.
        first: who has said its digest first, and that.

    Raises:
        BatchError: the digests of a batch differ.
        CopiesError: those of weights do.
    """
    device, digest = mine.split(" ", 1)
    other, seen = first.split(" ", 1)
    if seen == digest:
        return
    whose = f"before {device} was replaced" if device == other else "between devices"
    differs = f"{whose}: {other} has {seen}, {device} has {digest}"
    if what.of:
        raise CopiesError(
            f"{what} differ {differs}: their processors round otherwise, and what each computes "
            "for itself drifts apart. Split again so that one computes it and the others are sent "
            "it: replicas with --zero 1, a tensor group of devices of one host, stages that share "
            "a weight on one device; where the processors are alike, `bigbrain-fx verify FOLDER` "
            "says which numbers part",
            code="BX5000",
        )
    raise BatchError(
        f"{what} differs {differs}: every process must "
        "get the same from batches(seed): seed all random numbers with it, use no time or process "
        "id, sort listings of files and sets, and let no file change meanwhile",
        code="BX5001",
    )


class AgreeingTransport(Transport, Protocol):
    """A transport over which devices also compare what they must agree on."""

    def agree(self, what: Subject, digest: str, device: str) -> None:
        """Compare a digest with the other devices'; `finish` may be what raises."""

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Tell all devices, `names`, what this one says of a step; return whether all say yes."""
        ...
