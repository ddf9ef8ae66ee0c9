"""Peak memory of the pieces of a chain, and the pieces that fit a device.

The peak of a piece with at most `in_flight` micro-batches between forward and backward is as
follows. It is an upper bound of what `plan.schedule.memory` books, instruction by instruction.

    weights + optimizer state + gradients (twice, where nobody measured how they are added up)
    + in_flight x (what its units keep + received and sent values)
      (where stages run their forward again: what units keep of one micro-batch)
    + receives posted ahead + gradients of received and of sent values
    + what running a unit takes besides, the most; what was let go of by then taken off
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning.keeping import Keeping
from bigbrain_fx.planning.unit_work import Array, Numbers, OnKind, Work
from bigbrain_fx.planning.units import AHEAD

# ------------------------------------------------------------------------------------------------
# For what a line of units is cut: micro-batches, memory, and how many are in flight on a stage.


InFlight = int | tuple[int, ...] | None


def in_flight_at(stage: int, stages: int, micro_batches: int, in_flight: InFlight) -> int:
    """Return how many micro-batches a stage holds at once.

    Args:
        stage: from 0.
        stages: how many the pipeline has.
        micro_batches: in one step.
        in_flight: a number for every stage (GPipe: `micro_batches`), one per stage from the first,
            or None for classic 1F1B: the last stage holds one, the one before it two, and so on.
    """
    if in_flight is None:
        return max(1, min(micro_batches, stages - stage))
    wanted = in_flight if isinstance(in_flight, int) else in_flight[min(stage, len(in_flight) - 1)]
    return max(1, min(micro_batches, wanted))


@dataclass(frozen=True)
class Setting:
    """For what a line is cut.

    Attributes:
        cluster: with the memory that is left for tensors.
        micro_batches: in one step; what is done once a step counts 1/micro_batches of each.
        recompute: whether every stage runs its forward again.
        in_flight: see `in_flight_at`.
        at_most: in flight on any stage.
        memory_scale: multiplies every device's memory.
    """

    cluster: Cluster
    micro_batches: int
    recompute: bool = False
    in_flight: InFlight = None
    at_most: int | None = None
    memory_scale: float = 1.0

    def flight(self, stage: int, stages: int) -> int:
        """Return how many micro-batches a stage holds at once."""
        found = in_flight_at(stage, stages, self.micro_batches, self.in_flight)
        return found if self.at_most is None else min(found, self.at_most)

    def memory_bytes(self, device: str) -> float:
        """Return what a device has for tensors."""
        return self.cluster.device[device].memory_bytes * self.memory_scale

    @cached_property
    def ahead(self) -> int:
        """How many receives are posted ahead on a channel: none over nccl."""
        return 0 if all(device.kind == "cuda" for device in self.cluster.devices) else AHEAD


# ------------------------------------------------------------------------------------------------
# What the pieces of a line hold at their worst, and which of them fit a device.


@dataclass(frozen=True)
class Reach:
    """The pieces that fit, [first place, place after the last].

    From first place i, all ends up to `all_until[i]` fit. Beyond, some may: a longer piece may send
    less. `fits` has them; None when there are none.
    """

    all_until: Numbers
    fits: NDArray[np.bool_] | None

    @staticmethod
    def of(fits: NDArray[np.bool_]) -> Reach:
        """Sum a matrix up."""
        count = len(fits) - 1
        later = np.triu(np.ones_like(fits), 1)
        blocked = later & ~fits
        until = np.where(blocked.any(axis=1), blocked.argmax(axis=1) - 1, count)
        beyond = later & fits & (np.arange(count + 1)[None, :] > until[:, None])
        return Reach(until, fits & later if beyond.any() else None)

    def has(self, first: int, after: int) -> bool:
        """Whether a piece fits."""
        fits = self.fits is not None and bool(self.fits[first, after])
        return first < after and (fits or after <= int(self.all_until[first]))

    def last(self, first: int, most: int) -> int:
        """Return the largest end up to `most` with which a piece fits; `first` if there is none."""
        if self.fits is None:
            return max(first, min(most, int(self.all_until[first])))
        ends = np.flatnonzero(self.fits[first, : most + 1])
        return int(ends[-1]) if len(ends) else first


def before_places(each: Array, order: Sequence[int], places: Numbers) -> Array:
    """Return the sum of all units before each place."""
    found: Array = np.concatenate(([0.0], np.cumsum(each[list(order)])))[places]
    return found


class PieceMemory:
    """Memory of every piece of a chain, by device and by micro-batches in flight.

    Args:
        work: in the order of `work.groups`.
        order: of its units.
        places: where it may be cut.
    """

    def __init__(self, work: Work, order: Sequence[int], places: Numbers) -> None:
        self.work, self.order, self.places = work, order, places
        self.count = len(places) - 1
        self._reaches: dict[tuple[object, ...], Reach] = {}
        self._known_needs: dict[tuple[int, bool], _Needs] = {}

    def bytes_needed(self, device: str, in_flight: int, setting: Setting) -> Array:
        """Return [first place, place after the last] -> what the piece holds at its worst."""
        needs = self._needs(device, setting.recompute)
        held = needs.held(in_flight, setting)
        found: Array = np.maximum(held, needs.updated)
        return found

    def most_in_flight(
        self, device: str, first: int, after: int, setting: Setting, again: bool
    ) -> int:
        """Return how many micro-batches of a piece fit, at least 1."""
        needs, micro = self._needs(device, again), setting.micro_batches
        counts = np.arange(micro, 1, -1)
        fitting = needs.of_piece(first, after, counts, setting) <= setting.memory_bytes(device)
        return int(counts[fitting.argmax()]) if fitting.any() else 1

    def reach(self, device: str, in_flight: int, setting: Setting) -> Reach:
        """Return which pieces a device can hold."""
        memory, micro = setting.memory_bytes(device), setting.micro_batches
        key = (id(self.work.on[device]), in_flight, setting.recompute, memory, micro, setting.ahead)
        if key not in self._reaches:
            needed = self.bytes_needed(device, in_flight, setting)
            self._reaches[key] = Reach.of(needed <= memory)
        return self._reaches[key]

    def _needs(self, device: str, again: bool) -> _Needs:
        key = id(self.work.on[device]), again
        if key not in self._known_needs:
            self._known_needs[key] = self._summed(self.work.on[device], again)
        return self._known_needs[key]

    def _summed(self, on: OnKind, again: bool) -> _Needs:
        saved = self._saved(on.keeping)
        running = self._running(on.keeping, saved)
        leaving = self._messages[2] if self.work.trains else 0.0  # the last gradients on their way
        held = self._weights + self._gradients + self._tied + leaving
        updated = held + self._largest(on.updated_bytes)
        measured = on.keeping.measured or not self.work.trains
        return _Needs(
            self._weights,
            self._gradients,
            0 if measured else 1,
            *self._messages,
            saved,
            running,
            updated,
            again or self.work.recompute,
            self.work.trains,
        )

    @cached_property
    def _weights(self) -> Array:
        sums = _Rectangles(self.block, self.count)
        for weight in self.work.weights:
            nbytes = weight.nbytes + weight.trained_bytes * self.work.state_per_byte
            ties = max(0, min(len(weight.readers), len(self.work.on)) - 1)
            sums.reads(weight.readers, None, nbytes + ties * weight.trained_bytes)
        return sums.total()

    @cached_property
    def _gradients(self) -> Array:
        sums = _Rectangles(self.block, self.count)
        for weight in self.work.weights:
            sums.reads(weight.readers, None, weight.trained_bytes)
        return sums.total()

    @cached_property
    def _tied(self) -> Array:
        """Return the sums of gradients that come from several holders: made before the update."""
        sums = _Rectangles(self.block, self.count)
        for weight in self.work.weights:
            if min(len(weight.readers), len(self.work.on)) > 1:
                sums.reads(weight.readers, None, weight.trained_bytes)
        return sums.total()

    @cached_property
    def _messages(self) -> tuple[Array, Array, Array, Array]:
        """Return values received and sent, and gradients made for them and received, in bytes."""
        received, sent, made, returned = (_Rectangles(self.block, self.count) for _ in range(4))
        for value in self.work.values:
            received.reads(value.readers, value.maker, value.nbytes)
            sent.makes(value.maker, value.readers, value.nbytes)
            made.reads(value.readers, value.maker, value.gradient_bytes)
            returned.makes(value.maker, value.readers, value.gradient_bytes)
            returned.relays(value.readers, value.maker, value.gradient_bytes)
        return received.total(), sent.total(), made.total(), returned.total()

    def _saved(self, keeping: Keeping) -> Array:
        """Return what a piece keeps of one micro-batch, messages left out."""
        own = before_places(keeping.own_bytes, self.order, self.places)
        sums = _Rectangles(self.block, self.count)
        for kept in keeping.kept:
            sums.keeps(kept.maker, kept.last, kept.nbytes)
        found: Array = own[None, :] - own[:, None] + sums.total()
        return found

    def _running(self, keeping: Keeping, saved: Array) -> Array:
        """Return what running a piece holds at most, on top of all that it keeps."""
        if not self.work.trains:
            return self._alive(keeping.forward_bytes)
        most = self._largest(keeping.forward_bytes)
        if not keeping.measured:
            return most
        count = self.count
        made = keeping.own_bytes.copy()
        for kept in keeping.kept:
            made[kept.maker] += kept.nbytes
        before = before_places(made, self.order, self.places)
        forward = self._largest(self._blocks(keeping.forward_bytes) + before[:-1], whole=True)
        forward = forward - before[:, None] - saved
        own, later, reader = self._results(keeping)
        ends = np.arange(count + 1)[None, :]
        running = np.maximum(own[:, None], np.where(reader[:, None] < ends, later[:, None], 0.0))
        running = running - saved[1:, :]  # what came after has been let go of
        running[ends <= np.arange(count)[:, None]] = -np.inf
        backward = np.full((count + 1, count + 1), -np.inf)
        backward[:-1] = np.maximum.accumulate(running[::-1], axis=0)[::-1]
        backward = backward - self._messages[2]
        found: Array = np.maximum(forward, backward)
        return found

    def _alive(self, forward_bytes: Array) -> Array:
        """Return what a forward alone holds at most: a unit's own, and what is read after it."""
        sums, change = _Rectangles(self.block, self.count), np.zeros(self.work.count + 1)
        ends = self.places[1:][self.block]
        for value in self.work.values:
            sums.lives(value.maker, value.readers, value.nbytes)
            last = max(self._place[reader] for reader in value.readers)
            change[self._place[value.maker] + 1] += value.nbytes
            change[min(last + 1, ends[value.maker])] -= value.nbytes
        inside = change.cumsum()[self._place]  # of its block, where a unit runs
        held = sums.total()[:-1, 1:] + self._blocks(forward_bytes + inside)[None, :]
        found = np.zeros((self.count + 1, self.count + 1))
        found[:-1, 1:] = np.where(np.tri(self.count, dtype=bool).T, held, 0)
        return np.maximum.accumulate(found, axis=1)

    def _results(self, keeping: Keeping) -> tuple[Array, Array, Numbers]:
        """Return what blocks' backwards hold: alone, with their results' gradients, from where."""
        block = self.block
        later = np.append(block, self.count)
        reader = later[np.minimum(keeping.first_reader, self.work.count)]
        inside = reader == block
        with_result = keeping.backward_bytes + keeping.result_bytes
        own = self._blocks(np.where(inside, with_result, keeping.backward_bytes))
        first = np.where(inside, self.count, reader)[list(self.order)]
        return own, self._blocks(with_result), np.minimum.reduceat(first, self.places[:-1])

    @cached_property
    def block(self) -> Numbers:
        """Unit -> the block between two places that it is in."""
        found: Numbers = np.searchsorted(self.places, self._place, side="right") - 1
        return found

    @cached_property
    def _place(self) -> Numbers:
        place = np.empty(self.work.count, dtype=np.intp)
        place[list(self.order)] = np.arange(self.work.count)
        return place

    def _blocks(self, each: Array) -> Array:
        """Return the largest entry of each block."""
        line = each[list(self.order)]
        return np.maximum.reduceat(line, self.places[:-1]) if len(line) else line

    def _largest(self, each: Array, whole: bool = False) -> Array:
        """Return the largest entry of each piece; of entries of blocks, where they are `whole`."""
        block = each if whole else self._blocks(each)
        count = len(block)
        found = np.zeros((count + 1, count + 1))
        found[:-1, 1:] = np.where(np.tri(count, dtype=bool).T, block[None, :], 0)
        return np.maximum.accumulate(found, axis=1)


@dataclass(frozen=True)
class _Needs:
    """Memory of pieces, by its factor: arrays [first place, place after], or numbers."""

    weights: Array
    gradients: Array
    again_gradients: int
    received: Array
    sent: Array
    made_gradients: Array
    returned: Array
    saved: Array
    running: Array
    updated: Array
    once_saved: bool
    trains: bool
    _whatever: dict[tuple[int, int], Array] = field(default_factory=dict)

    def held(self, flight: int, setting: Setting) -> Array:
        """Return the bytes with so many micro-batches in flight."""
        micro, ahead = setting.micro_batches, setting.ahead
        received = min((flight if self.trains else 1) + ahead, micro)
        sent = flight if self.trains else micro  # a forward alone goes on before values are taken
        found = self._whatever_at(setting) + sent * self.sent + received * self.received
        found += (1 if self.once_saved else flight) * self.saved
        return found

    def of_piece(self, first: int, after: int, flights: Numbers, setting: Setting) -> Array:
        """Return the bytes of one piece, for each number of micro-batches in flight."""
        micro, ahead, piece = setting.micro_batches, setting.ahead, (first, after)
        found: Array = self._whatever_at(setting)[piece] + flights * self.sent[piece]
        found += np.minimum(flights + ahead, micro) * self.received[piece]
        found += (1 if self.once_saved else flights) * self.saved[piece]
        return found

    def _whatever_at(self, setting: Setting) -> Array:
        key = setting.micro_batches, setting.ahead
        if key not in self._whatever:
            self._whatever[key] = self._whatever_is_in_flight(*key)
        return self._whatever[key]

    def _whatever_is_in_flight(self, micro: int, ahead: int) -> Array:
        several = min(2, micro)  # a message is on its way while the next is made
        return (
            self.weights
            + (1 + self.again_gradients * (micro > 1)) * self.gradients
            + several * self.made_gradients
            + min(1 + ahead, micro) * self.returned
            + self.running
        )


class _Rectangles:
    """Sums of constants over rectangles of [first place, place after]: corners, then two sums."""

    def __init__(self, block: Numbers, count: int) -> None:
        self._block = block
        self._size = count + 2
        self._corners: list[tuple[int, int, int, int, float]] = []

    def reads(self, readers: Sequence[int], maker: int | None, nbytes: float) -> None:
        """Add to pieces that begin after the maker and contain a reader."""
        for before, block in self._firsts(readers, maker):
            self._corners.append((before + 1, block + 1, block + 1, self._size, nbytes))

    def relays(self, readers: Sequence[int], maker: int, nbytes: float) -> None:
        """Add to pieces that begin after the maker, contain a reader and end before the last."""
        last = max(int(self._block[reader]) for reader in readers)
        for before, block in self._firsts(readers, maker):
            if last > block:
                self._corners.append((before + 1, block + 1, block + 1, last + 1, nbytes))

    def makes(self, maker: int, readers: Sequence[int], nbytes: float) -> None:
        """Add to pieces that contain the maker and end before its last reader."""
        block = int(self._block[maker])
        last = max(int(self._block[reader]) for reader in readers)
        if last > block:
            self._corners.append((0, block + 1, block + 1, last + 1, nbytes))

    def keeps(self, maker: int, last: int, nbytes: float) -> None:
        """Add to pieces that contain both units."""
        block, after = int(self._block[maker]), int(self._block[last])
        self._corners.append((0, block + 1, max(block, after) + 1, self._size, nbytes))

    def lives(self, maker: int, readers: Sequence[int], nbytes: float) -> None:
        """Add, by first place and running block, where a piece has made it and still reads it."""
        block, last = int(self._block[maker]), max(int(self._block[r]) for r in readers)
        if last > block:
            self._corners.append((0, block + 1, block + 2, last + 2, nbytes))

    def _firsts(self, readers: Sequence[int], maker: int | None) -> Iterator[tuple[int, int]]:
        """Yield the blocks of readers, each with the one before, or the maker's: once a piece."""
        before = -1 if maker is None else int(self._block[maker])
        for block in sorted({int(self._block[reader]) for reader in readers}):
            if block > before:
                yield before, block
                before = block

    def total(self) -> Array:
        found = np.zeros((self._size + 1, self._size + 1))
        if self._corners:
            top, bottom, left, right, nbytes = np.array(self._corners).T
            rows = [c.astype(np.intp) for c in (top, bottom)]
            columns = [c.astype(np.intp) for c in (left, right)]
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    np.add.at(found, (row, column), nbytes if i == j else -nbytes)
        size = self._size - 1
        summed: Array = found.cumsum(axis=0).cumsum(axis=1)[:size, :size]
        return summed
