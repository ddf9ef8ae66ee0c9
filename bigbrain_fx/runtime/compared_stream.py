"""Data by step number, compared: all devices have the same batch of a step, and a run may go back.

The stream has random state of its own, of generators that the user's file has made, too: drawing
data never moves the generators of the model, nor those of another device in this process.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor

from .checksum import checksum
from .stream import BatchStream, RandomState

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
