"""Data by step number, compared: all devices have the same batch of a step, and a run may go back.

`require_same` says how what two devices have differs, and what to do.

The stream has random state of its own, also of generators that the user's file has made. Drawing
data never moves the generators of the model, nor those of another device in this process.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from .channel import Transport
from .checksum import checksum
from .coded import InputError
from .stream import BatchError, BatchStream, RandomState


class Subject(NamedTuple):
    """Subject of a comparison: the batch of a step, or the copies `of` weights after it."""

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


def require_same(what: Subject, mine: str, first: str) -> None:
    """Refuse what is another one than what somebody has said before.

    Args:
        what: is compared.
        mine: who says it now, and its digest.
        first: who has said its digest first, and that.

    Raises:
        BatchError: the digests of a batch differ.
        InputError: those of weights do.
    """
    device, digest = mine.split(" ", 1)
    other, seen = first.split(" ", 1)
    if seen == digest:
        return
    whose = f"before {device} was replaced" if device == other else "between devices"
    differs = f"{whose}: {other} has {seen}, {device} has {digest}"
    if what.of:
        raise InputError(
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


OWN = Path(__file__).with_name("own_dice.py")  # where the file that was split has generators


class ComparedStream(BatchStream):
    """The batches of one run, by step; args as of a BatchStream.

    `batches(seed, start)`, if it takes that, gives the batches from number `start` on, which must
    depend on no random state of before.
    """

    def _start(self, step: int = 0) -> None:
        self.step = step - 1
        self.parts = {}
        self.digests: dict[str, str] = {}
        self.random = self._random_state()
        with self.random, self._calling(step):
            batches = self.batches(self.seed, start=step) if step else self.batches(self.seed)
            self.iterator = iter(batches)

    def _random_state(self) -> RandomState:
        """Return the stream's own state, with states of the generators that the file has."""
        if not OWN.is_file():
            return RandomState(self.seed)
        from .own_dice import OwnRandomState, own_dice

        return OwnRandomState(self.seed, own_dice(self.batches))

    def _calling(self, step: int) -> AbstractContextManager[None]:
        """Surround calls of the user's code."""
        return nullcontext()

    def rewind(self, step: int) -> None:
        """Be ready for `step`, which may have been read already.

        `batches(seed, start)` starts there; a function without `start` is read up to it.
        """
        if self._starts_anywhere():
            self._note_first()
            self._start(step)
        elif step < self.step:
            self._start()

    def _starts_anywhere(self) -> bool:
        return "start" in inspect.signature(self.batches).parameters

    def _note_first(self) -> None:
        """Learn what the first batch has: a run that goes on from a commit begins with another."""

    def digest(self) -> str:
        """Return a hash of the current batch: shapes, types, and a checksum of every entry."""
        text = json.dumps(self.digests, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _entry(self, name: str, batch: object) -> Tensor:
        found = super()._entry(name, batch)
        self.digests[name] = f"{found.dtype}{[*found.shape]} {checksum(found)}"
        return found
