"""A run that a caller feeds: batches by step, stored until no device can need them again.

    caller's thread ── put(step, bytes) ──▶ a nameless file ──▶ to each device that wants that step
                    ── ask(step) ──▶ every device takes a snapshot before it ──▶ answered

Batches lie one after another in a file. A new file begins after a snapshot of all devices, and the
old one goes when the last of its batches does. Few files are open, however many batches there
are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from .crew import Crew
from .policies import Acts
from .processes import Member
from .snapshots import Snapshots, nameless


@dataclass(frozen=True)
class FedPlace:
    """Place of the batch of a step in its file."""

    file: int
    start: int
    size: int


@dataclass
class Feed:
    """Batches that a caller's thread hands to a run; `stop` ends it after the last step put.

    Attributes:
        first: the step whose batch the devices want first; None until the devices have reported it.
        on_first: is called with it.
        on_state: gets the step and each device's file of it, which is its own to close.
    """

    on_first: Callable[[int], None]
    on_state: Callable[[int, Mapping[str, int]], None]
    wake: Callable[[], None] = lambda: None
    stop: Callable[[], None] = lambda: None
    first: int | None = None
    state_at: int | None = None
    _goes_on: bool = False  # the next batch lies in the file of the one before it
    _places: dict[int, FedPlace] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, step: int, pieces: Iterable[bytes]) -> None:
        """Hand over the batch of a step."""
        with self._lock:
            newest = self._places.get(step - 1) if self._goes_on else None
            file, start = (newest.file, newest.start + newest.size) if newest else (nameless(), 0)
            size = sum(_written(file, piece) for piece in pieces)
            self._places[step] = FedPlace(file, start, size)
            self._goes_on = True
        self._ring()

    def ask(self, step: int) -> None:
        """Ask for the state of all devices before `step`, of which no batch was put."""
        self.state_at = step
        self._ring()

    def place(self, step: int) -> FedPlace | None:
        """Return where the batch of a step is, if it was put."""
        return self._places.get(step)

    def forget(self, before: int) -> None:
        """Forget batches that nobody can want; the next one begins a file."""
        with self._lock:
            old = {step for step in self._places if step < before}
            self._goes_on = self._goes_on and not old
            self._close(old)

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            self._close(set(self._places))

    def _ring(self) -> None:
        with suppress(OSError):  # the run has ended
            self.wake()

    def _close(self, old: set[int]) -> None:
        files = {self._places.pop(step).file for step in old}
        for file in files - {place.file for place in self._places.values()}:
            os.close(file)


def _written(file: int, piece: bytes) -> int:
    left = memoryview(piece)
    while left:
        left = left[os.write(file, left) :]
    return len(piece)


class Feeding:
    """Serve the devices of a crew from a feed."""

    def __init__(
        self, crew: Crew, feed: Feed, snapshots: Snapshots, stop: Callable[[], None]
    ) -> None:
        self.crew, self.snapshots = crew, snapshots
        self.feed = feed
        self.wanted: dict[str, int] = {}  # by the name of a process
        self.told: dict[str, int] = {}  # the step whose state each was asked for
        feed.wake, feed.stop = crew.wake, stop

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {"wants": self.hear_wants}

    def orders(self) -> dict[str, bool]:
        """Return what a process receives besides: it takes its batches from here."""
        return {"fed": True}

    def hear_wants(self, member: Member, step: int) -> None:
        """Note that a device rests until the batch of a step is there."""
        self.wanted[member.name] = step
        if self.feed.first is None:
            self.feed.first = step
            self.feed.on_first(step)

    def look(self, now: float) -> None:
        """Hand out what is there, ask for states, and answer when all devices have taken theirs."""
        snapshots = self.snapshots
        self.feed.forget(max(snapshots.epoch, 0))
        for member in self.crew.at_work():
            self._serve(member)
        if self.feed.state_at is not None and self.feed.state_at == snapshots.epoch:
            self.feed.state_at = None
            files = {name: os.dup(file) for name, file in snapshots.files().items()}
            self.feed.on_state(snapshots.epoch, files)

    def _serve(self, member: Member) -> None:
        step = self.wanted.get(member.name)
        if step is None:
            return
        place = self.feed.place(step)
        if place is not None:
            del self.wanted[member.name]
            self.crew.order(
                member, "batch", files=(place.file,), step=step, start=place.start, size=place.size
            )
        elif self.feed.state_at == step and self.told.get(member.name) != step:
            self.told[member.name] = step
            self.crew.order(member, "state", step=step)
