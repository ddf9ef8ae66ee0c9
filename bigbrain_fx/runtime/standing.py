"""A bundle of replicas without some of them: the others compute their micro-batches, too.

    micros   ((0, 2), (1, 3))   replica 1 is lost ──▶   ((0, 1, 2, 3), ())
    a step   the emitted schedule, as often as it takes; then one update

Cuts and schedules stay as they were emitted, and so does a device's peak. A device with more
micro-batches than its schedule goes through it again. This file knows no process and no message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from .buckets import Listed, channels_of, read_buckets
from .channel import Channel
from .device import Device
from .joining import join
from .peer_states import can_take_from_peers
from .replicas import sizes
from .state_parts import held_names
from .weights import read_index

if TYPE_CHECKING:
    from .bundle import Bundle

Micros = tuple[tuple[int, ...], ...]
_COMPUTE = ("forward", "backward", "weights")
_ONCE = (("tied", "tied"), ("norm", "norms"), ("loss", "losses"))  # kind of channel, instruction


def replicas_of(bundle: Bundle, *, commits: bool) -> list[list[str]]:
    """Return the devices of each replica, where a run can go on without one; else nothing.

    With commits, each device of one replica must hold the same as one of any other: it writes that
    device's part of a commit.
    """
    first = bundle.devices[0]
    plain = not any(
        cls.members or cls.offload or cls.compiled or cls.replica_of_stage for cls in bundle.devices
    )
    if not (plain and first.sum_order in ("micro", "tree") and can_take_from_peers(bundle)):
        return []
    if commits and not alike(bundle):
        return []
    found: list[list[str]] = [[] for _ in first.micros]
    for cls in bundle.devices:
        found[cls.replica].append(cls.name)
    return found


def alike(bundle: Bundle) -> dict[str, tuple[str, ...]]:
    """Return, by device, those that hold the same, by replica; nothing, where cuts differ."""
    home = _home(bundle)
    listed = read_buckets(bundle.folder).values()
    rows = {tuple(home[int(stage)] for stage in entry["stages"]) for entry in listed}
    found = {name: row for row in rows for name in row}
    return found if len(found) == sum(map(len, rows)) == len(bundle.devices) else {}


def heirs(bundle: Bundle, lost: Collection[str]) -> dict[str, str]:
    """Return the device that writes each lost device's files, where cuts are the same."""
    holders = alike(bundle)
    names = [cls.name for cls in bundle.devices if cls.name in lost and holders]
    return {name: next(other for other in holders[name] if other not in lost) for name in names}


def _home(bundle: Bundle) -> dict[int, str]:
    return {stage: cls.name for cls in bundle.devices for stage in cls.stages}


def shared_out(micros: Sequence[Sequence[int]], lost: Collection[int]) -> Micros:
    """Return each replica's micro-batches where those of some go to the others, ascending.

    One after another goes to who then has the fewest, beside what it had.
    """
    found = [[] if number in lost else list(own) for number, own in enumerate(micros)]
    left = [number for number in range(len(micros)) if number not in lost]
    for micro in sorted(micro for number in lost for micro in micros[number]):
        taker = min(left, key=lambda n: ((len(found[n]) + 1) / len(micros[n]), n))
        found[taker].append(micro)
    return tuple(tuple(sorted(own)) for own in found)


def merged(pieces: Sequence[int], lost: Collection[int]) -> tuple[int, ...]:
    """Return a bucket's pieces where those of lost replicas are their neighbours'.

    Neighbours', so that no number moves within the bucket.
    """
    found = [0] * len(pieces)
    left = [place for place in range(len(pieces)) if place not in lost]
    for place, size in enumerate(pieces):
        found[max((p for p in left if p <= place), default=left[0])] += size
    return tuple(found)


class TakingOver(Device):
    """A device that has more micro-batches than its schedule was emitted for.

    Attributes:
        emitted: the class as it was emitted.
        listed: what buckets.json would say.
        owned: trained parameter -> the device that answers for its norm.
        replica_of: device -> which replica it is part of.
    """

    emitted: type[Device]
    listed: Listed
    owned: Mapping[str, str]
    replica_of: Mapping[str, int]

    @staticmethod
    def become(device: Device, cls: type[TakingOver]) -> None:
        """Let a device, in the step that it has begun or before one, be of another class."""
        device.give_up_step()
        device.__class__ = cls
        device.held.owner = cls.owned
        join(device, cls.listed)

    def step_once(self) -> None:
        """Go through the emitted schedule until all own micro-batches are through, and update."""
        own, most = self.micros[self.replica], self.emitted.own_micro_batches()
        for start in range(0, len(own), most):
            self.emitted.step_once(cast(Device, _Pass(self, own[start : start + most], most)))
        self.sum_gradients()
        self.exchange_statistics()
        for kind, what in _ONCE:
            self._exchange(kind, what)
        self.optimizer_step()

    def _exchange(self, kind: str, what: str) -> None:
        """Send and take what devices tell each other once a step."""
        found = [c for c in self.channels if c.kind == kind and not c.is_local]
        for channel in (c for c in found if c.sender == self.name):
            getattr(self, f"send_{what}")(channel)
        for channel in (c for c in found if c.receiver == self.name):
            whose = (self.replica_of[channel.sender],) if kind == "loss" else ()
            getattr(self, f"recv_{what}")(channel, *whose)

    def _reports(self) -> bool:
        return self.replica == min(r for r, own in enumerate(self.micros) if own)


class _Pass:
    """A device as its emitted schedule sees it: with as many micro-batches, some of them none."""

    def __init__(self, device: TakingOver, own: Sequence[int], most: int) -> None:
        self.device = device
        self.replica = 0
        self.micros = ((*own, *[None] * (most - len(own))),)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the device has
        found = getattr(self.device, name)
        if name.rpartition("_")[0] not in _COMPUTE:
            return found
        return lambda micro: None if micro is None else found(micro)

    def update(self) -> None:
        """Leave it to the last pass's end."""


def without(bundle: Bundle, lost: Collection[str]) -> Bundle:
    """Return a bundle whose replicas, but for the lost ones, compute all micro-batches.

    All processes find the same, each by itself.

    Args:
        bundle: as it was emitted.
        lost: all devices of the replicas that are lost.
    """
    ranks = [rank for rank, cls in enumerate(bundle.devices) if cls.name not in lost]
    made = _Rewired(bundle, frozenset(lost))
    return replace(
        bundle,
        devices=tuple(made.device(bundle.devices[rank]) for rank in ranks),
        kinds=tuple(bundle.kinds[rank] for rank in ranks),
        threads=tuple(bundle.threads[rank] for rank in ranks),
    )


class _Rewired:
    """Computations, sums and reports of devices without the lost ones, with their channels."""

    def __init__(self, bundle: Bundle, lost: frozenset[str]) -> None:
        self.bundle, self.lost = bundle, lost
        self.left = [cls for cls in bundle.devices if cls.name not in lost]
        self.gone = {cls.replica for cls in bundle.devices if cls.name in lost}
        self.before = self.left[0].micros
        self.micros = shared_out(self.before, self.gone)
        self.planned = {c.tag: c for cls in bundle.devices for c in cls.channels}
        self.tags = count(max(self.planned, default=-1) + 1)

    def device(self, cls: type[Device]) -> type[Device]:
        """Return a device's class with these numbers."""
        own = channels_of(self.listed, cls.name)  # first: tags are given out as they are asked for
        kept = [c for c in cls.channels if c.kind in ("activation", "gradient", "tied")]
        once = [c for c in self.once if cls.name in (c.sender, c.receiver)]
        facts = {
            "__module__": cls.__module__,
            "emitted": cls,
            "listed": self.listed,
            "owned": self.owned,
            "replica_of": {each.name: each.replica for each in self.bundle.devices},
            "stands_for": tuple(n for n, heir in self.heirs.items() if heir == cls.name),
            "names": tuple(each.name for each in self.left),
            "micros": self.micros,
            "channels": (*kept, *once, *own),
        }
        return type(cls.__name__, (TakingOver, cls), facts)

    @cached_property
    def heirs(self) -> dict[str, str]:
        """Return the devices that write the lost devices' files."""
        return heirs(self.bundle, self.lost)

    # ------------------------------------------------------------------ sums

    @cached_property
    def listed(self) -> Listed:
        """Return the contents of buckets.json, without the lost devices."""
        found = {}
        for name, entry in read_buckets(self.bundle.folder).items():
            if "pieces" in entry:
                entry = {**entry, "pieces": merged(entry["pieces"], self.gone)}
                found[name] = {**entry, "channels": [*self._sums(entry)]}
            else:
                found[name] = {**entry, "channels": [*self._statistics(entry)]}
        return found

    def _ways(self, entry: Mapping[str, Any]) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield two replicas, and where a channel from one to the other starts and ends."""
        home, stages = _home(self.bundle), entry["stages"]
        places = [place for place in range(len(stages)) if place not in self.gone]
        for a in places:
            for b in places:
                ends = [stages[a], stages[b]]
                if a != b:
                    yield a, b, [ends, [home[end] for end in ends]]

    def _sums(self, entry: Mapping[str, Any]) -> Iterator[list[Any]]:
        order = self.left[0].sum_order
        for a, b, ends in self._ways(entry):
            for kind, place in (("reduce", b), ("gather", a)):
                elements = entry["pieces"][place] + entry["marks"]
                parts = len(sizes(order, self.micros[a])) if kind == "reduce" else 1
                if elements:
                    yield [next(self.tags), kind, *ends, elements, parts]

    def _statistics(self, entry: Mapping[str, Any]) -> Iterator[list[Any]]:
        if not entry["channels"]:
            return
        _, kind, (source, _), _, elements, per_step = entry["channels"][0]
        each = elements // len(self.before[entry["stages"].index(source)])  # of a micro-batch
        for a, _, ends in self._ways(entry):
            yield [next(self.tags), kind, *ends, each * len(self.micros[a]), per_step]

    # ------------------------------------------------------------------ once a step

    @cached_property
    def owned(self) -> dict[str, str]:
        """Return the owner of each parameter's norm: of a lost one's, the first that holds it."""
        owner = read_index(self.bundle.folder / "weights").owner
        if not self.lost.intersection(owner.values()):
            return dict(owner)
        held = {cls.name: held_names(cls) for cls in self.left}
        return {
            name: device
            if device not in self.lost
            else next(other for other in held if f"parameter:{name}" in held[other])
            for name, device in owner.items()
        }

    @cached_property
    def once(self) -> tuple[Channel, ...]:
        """Channels of norms and losses."""
        return (*self._norms(), *self._losses())

    def _norms(self) -> Iterator[Channel]:
        like = next((c for c in self.planned.values() if c.kind == "norm"), None)
        told = list(self.owned.values())
        for sender in self.left if like is not None else ():
            for receiver in self.left:
                if sender is not receiver and sender.name in told:
                    yield self._like(like, sender, receiver, told.count(sender.name))

    def _losses(self) -> Iterator[Channel]:
        like = next((c for c in self.planned.values() if c.kind == "loss"), None)
        makers = sorted((c for c in self.left if c.loss is not None), key=lambda c: c.replica)
        for sender in makers[1:] if like is not None else ():
            yield self._like(like, sender, makers[0], len(self.micros[sender.replica]))

    def _like(
        self, like: Channel | None, sender: type[Device], receiver: type[Device], elements: int
    ) -> Channel:
        assert like is not None
        return replace(
            like,
            tag=next(self.tags),
            source=min(sender.stages),
            target=min(receiver.stages),
            sender=sender.name,
            receiver=receiver.name,
            shape=(elements,),
        )
