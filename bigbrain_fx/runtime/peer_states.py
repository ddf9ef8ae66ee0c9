"""The state of a dead device from its peers in other replicas; then nobody takes snapshots.

    all devices have a step's messages ──▶ all vote ──▶ all update: until then, all have its start
    a device dies ──▶ its replacement takes that from those that hold the same names, and begins
                      the step again

Replicas that divide nothing (ZeRO 0) hold every parameter, and what the optimizer keeps for it, as
often as there are replicas. A peer that has updated would have lost the state that a replacement
begins with. No peer therefore updates before all can: no message of a step is wanted after that. A
state travels as its image, in pieces, over the connections that all make anew after a death. Where
the replicas are cut differently, it comes from several peers, by name.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .channel import Channel
from .control import Control
from .mesh import MeshTransport
from .peers import PeerLostError
from .state import State, StateError, restore
from .state_parts import held_names, joined_state, part_of_state, state_before_update

if TYPE_CHECKING:
    from .bundle import Bundle
    from .device import Device

PIECE = 1 << 22  # bytes of a state in one message: so much more memory than the state is taken
Names = frozenset[str]


def can_take_from_peers(bundle: Bundle) -> bool:
    """Whether every tensor of a bundle's devices is on another device, too, with the same values.

    A user's function that is called before a step may write into a device. Within the step a peer
    then has other values than at its start.
    """
    whole = all(
        len(cls.micros) > 1 and not (cls.zero_stage or cls.is_opaque) for cls in bundle.devices
    )
    return whole and not bundle.hooks.on_step_begin


def givers_of(
    taker: str, held: Mapping[str, Names], lacking: Collection[str]
) -> dict[str, Names] | str:
    """Return who gives a device which part of its state; or a name that nobody has.

    All devices find the same, each by itself.

    Args:
        taker: the device.
        held: what the states of all devices have that may hold the same, by device, in the order
            of their ranks.
        lacking: who has no state now.
    """
    left, found = held[taker], dict[str, Names]()
    there = [name for name in held if name not in lacking]
    while left or (there and not found):  # a device without tensors is told the loss scale
        giver = max(there, key=lambda name: len(held[name] & left), default=taker)
        if giver == taker or (left and not held[giver] & left):
            return min(left)
        found[giver] = held[giver] & left
        left -= held[giver]
    return found or "anything"


class PeerStates:
    """State that one device gives to devices that lack theirs, and takes where it lacks its own.

    Args:
        bundle: its classes say what each device holds.
        device: this one.
        control: the connection to the supervisor.
        lacks: the step whose beginning it has to take; None: it has its state.

    Attributes:
        began: when this step did.
    """

    def __init__(self, bundle: Bundle, device: Device, control: Control, lacks: int | None) -> None:
        self.classes = bundle.devices
        self.device = device
        self.control = control
        self.lacks = lacks
        self.began = time.perf_counter()  # this step

    @cached_property
    def _held(self) -> Mapping[int, Mapping[str, Names]]:
        """Return the names in states, by a device's place in its group: others hold other parts."""
        found: dict[int, dict[str, Names]] = {}
        for cls in self.classes:
            found.setdefault(_place(cls), {})[cls.name] = held_names(cls)
        return found

    def like(self, taker: str) -> Mapping[str, Names]:
        """Return what the states of devices have that hold the same parts as one, by device."""
        return next(held for held in self._held.values() if taker in held)

    @property
    def must_end_step(self) -> bool:
        """Whether all have voted on this device's step, so that it updates before it gives."""
        return self.lacks is None and self.control.epoch > self.device.finished

    def so_far(self) -> dict[str, float | None]:
        """Return what to say with a vote, after which no process may be left that has the loss."""
        if not self.control.peers:
            return {}
        loss = self.device.loss_now()
        value = None if loss is None else float(loss)
        return {"loss": value, "step_s": round(time.perf_counter() - self.began, 6)}

    def exchange(self, inner: MeshTransport, lacking: Mapping[str, int]) -> None:
        """Give and take, in a generation that has just been connected.

        Args:
            inner: its transport, which has carried nothing yet.
            lacking: devices without a state -> the step whose beginning they want.

        Raises:
            PeerLostError: another device died; all meet again.
        """
        for taker, step in sorted(lacking.items()):
            givers = givers_of(taker, self.like(taker), lacking)
            if taker == self.device.name:
                self._take(inner, givers, step)
            elif not isinstance(givers, str) and self.device.name in givers:
                self._give(inner, taker, givers[self.device.name], step)

    def _give(self, inner: MeshTransport, taker: str, names: Names, step: int) -> None:
        state = part_of_state(state_before_update(self.device), names)
        if state.step != step:
            raise StateError(
                f"{taker} wants the state of step {step}, found {state.step}", code="BX5108"
            )
        size, piece = state.nbytes, min(PIECE, state.nbytes)
        room = bytearray(-(-size // piece) * piece)
        state.copy_into(room)
        about, pieces = self._channels(self.device.name, taker, piece)
        inner.send(about, torch.tensor([size, piece]))
        for start in range(0, len(room), piece):
            inner.send(pieces, torch.frombuffer(room, dtype=torch.uint8, count=piece, offset=start))
            inner.finish()  # one piece at a time has memory

    def _take(self, inner: MeshTransport, givers: dict[str, Names] | str, step: int) -> None:
        if isinstance(givers, str):
            self._tell_orphaned(givers)
            return
        images = {giver: self._image(inner, giver) for giver in givers}
        restore(self.device, joined_state([State.from_buffer(image) for image in images.values()]))
        if self.device.finished != step:
            raise StateError(
                f"the state of step {step} is wanted, found {self.device.finished}", code="BX5109"
            )
        self.lacks = None
        self.control.say("took", step=step, peers=[*givers], bytes=_total(images.values()))

    def _image(self, inner: MeshTransport, giver: str) -> bytearray:
        about, _ = self._channels(giver, self.device.name, 1)
        inner.begin_step(((about, 1),))
        size, piece = inner.recv(about).tolist()
        _, pieces = self._channels(giver, self.device.name, piece)
        room = bytearray(-(-size // piece) * piece)
        inner.begin_step(((pieces, len(room) // piece),))
        for start in range(0, len(room), piece):
            place = torch.frombuffer(room, dtype=torch.uint8, count=piece, offset=start)
            place.copy_(inner.recv(pieces))
        return room

    def _tell_orphaned(self, name: str) -> None:
        """Let all begin again: what this device held is nowhere any more."""
        self.control.say("orphaned", text=name)
        self.control.wait_generation(self.control.generation)  # it is ended while it waits
        raise PeerLostError("nobody has the state of this device", code="BX5110")

    def _channels(self, giver: str, taker: str, piece: int) -> tuple[Channel, Channel]:
        """Return the channels of a state: how long it is, and its pieces."""
        ranks = [cls.name for cls in self.classes]
        used = max((channel.tag for cls in self.classes for channel in cls.channels), default=0)
        tag = used + 1 + 2 * (ranks.index(giver) * len(ranks) + ranks.index(taker))
        ends = taker, -1, -1, giver, taker
        return (
            Channel(tag, "state", *ends, (2,), torch.int64),
            Channel(tag + 1, "state", *ends, (piece,), torch.uint8),
        )


def _place(cls: type[Device]) -> int:
    """Return a device's place in its tensor group; 0 where it is in none."""
    return cls.members.index(cls.name) if cls.members else 0


def _total(images: Iterable[bytearray]) -> int:
    return sum(map(len, images))
