"""A tape of one step of a device, by which another process computes the step again and compares.

    in     state before the step | its batch | messages received | votes
    out    checksums of the messages sent and of the state after

A device is a function of its inputs: a difference means that one of the two computed wrong, finite
or not. Seed, device and step decide whether a step gets a tape: a replacement draws the same. Like
Zeno (Xie et al., ICML 2019) it suspects a worker by work done twice. Here, the work is compared
bit by bit, and no worker is outvoted.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bundle import Bundle, make_device
from .channel import Channel, Layout, unpack
from .checksum import WORD, checksum
from .compared_stream import Subject
from .control import Control
from .hooked_device import Hooks
from .mesh import seal
from .network import pack
from .packets import Duty
from .state import State, StateError, restore, state_of

if TYPE_CHECKING:
    from .device import Device
    from .replay import ReplayTransport

DRAWN_BITS = 53
BATCH, GOT = "batch", "got"  # what the tensors of a tape are, by the first part of their names


def is_drawn(rate: float, seed: int, device: str, step: int) -> bool:
    """Whether a step of a device is computed again, at a share `rate` of all steps."""
    found = hashlib.blake2b(f"{seed}/{device}/{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(found, "little") >> (64 - DRAWN_BITS)
    return number < rate * (1 << DRAWN_BITS)


def require_repeatable(bundle: Bundle) -> None:
    """Refuse a bundle whose steps are functions of more than a tape has.

    Raises:
        StateError: names what that is.
    """
    found = {
        "calls functions in `on_step_begin`": bool(bundle.hooks.on_step_begin),
        "offloads": any(cls.offload or cls.saving for cls in bundle.devices),
        "runs steps into each other (--asynchronous)": any(
            cls.empties_every > 1 for cls in bundle.devices
        ),
        "runs the user's own step": any(cls.is_opaque for cls in bundle.devices),
        "has opaque modules with state": any(hasattr(cls, "stateful") for cls in bundle.devices),
        "has GPUs": set(bundle.kinds) != {"cpu"},
    }
    for what, is_so in found.items():
        if is_so:
            raise StateError(
                f"no step can be computed again of a bundle that {what}: leave --suspect out",
                code="BX5170",
            )


# --------------------------------------------------------------------------- recording


@dataclass
class Tape:
    """Inputs and outputs of one step of a device; `ReplayTransport` records them."""

    device: Device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    got: list[tuple[int, str]] = field(default_factory=list)  # channel's tag, tensor's name
    sent: list[tuple[int, str]] = field(default_factory=list)  # channel's tag, checksum
    votes: list[bool] = field(default_factory=list)
    after: Mapping[str, str] = field(default_factory=dict)

    def hear(self, channel: Channel, tensor: Tensor) -> None:
        """Keep a message that was received."""
        name = f"{GOT}:{len(self.got)}"
        self._keep(name, tensor)
        self.got.append((channel.tag, name))

    def tell(self, channel: Channel, sealed: Tensor) -> None:
        """Take note of a message that leaves, by the checksum that it has anyway."""
        self.sent.append((channel.tag, _end_of(sealed)))

    def end(self) -> None:
        """Note that all instructions of the step have run."""
        self.after = checksums(self.device)

    def image(self, channels: Mapping[str, Any]) -> State:
        """Return all but the state before the step; `channels` are the layouts of messages."""
        stream = self.device.stream
        parts: dict[str, list[str]] = {}
        known: dict[int, str] = {}  # inputs that are not split are one tensor
        for name, tensors in stream.parts.items():
            for micro, tensor in enumerate(tensors):
                if id(tensor) not in known:
                    known[id(tensor)] = f"{BATCH}:{micro}:{name}"
                    self._keep(known[id(tensor)], tensor)
            parts[name] = [known[id(tensor)] for tensor in tensors]
        out = {"sent": self.sent, "after": self.after}
        into = {"got": self.got, "votes": self.votes, "parts": parts, "sizes": stream.sizes}
        about = {"layouts": self.layouts, "channels": channels, "weights": [*stream.weights]}
        return State(self.device.step, self.tensors, {**out, **into, **about})

    def _keep(self, name: str, tensor: Tensor) -> None:
        layout = Layout.of(tensor)
        self.layouts[name] = layout.shape, layout.strides
        self.tensors[name] = pack(tensor.detach(), layout).clone()


@dataclass(frozen=True)
class TapeCheck:
    """A step of a device that a spare is to compute again.

    Attributes:
        rank: the device's number.
        file: holds the tape, and is this process's to close.
        start: of the tape's second part there.
        number: of the tape.
    """

    rank: int
    file: int
    start: int
    number: int


class TapeLine:
    """Messages about tapes from the supervisor, which owns their memory."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.say = control.say
        self.tapes: dict[int, int] = {}  # step -> the file for its tape
        control.listen_to({"tape": self._take, "check": self._check})

    def _take(self, files: tuple[int, ...], step: int) -> None:
        self.tapes[step] = files[0]

    def _check(self, files: tuple[int, ...], rank: int, start: int, number: int) -> None:
        self.control.duties.append(TapeCheck(rank, files[0], start, number))

    def wait_tape(self, step: int, generation: int) -> int | None:
        """Wait for the file of a step's tape; None if all meet anew before."""
        control = self.control
        with control.waiting("a spare that checks its last tape"), control.changed:
            control.changed.wait_for(lambda: step in self.tapes or control.generation > generation)
            return self.tapes.pop(step, None)


def listen(control: Control) -> TapeLine:
    """Receive what the supervisor says of tapes."""
    return TapeLine(control)


class TapeRecorder:
    """Tapes of the steps of this process that are drawn.

    Args:
        transport: of the device, which tells a tape what passes.
        line: to the process that owns the memory of tapes.
        rate: the share of steps.
    """

    def __init__(self, transport: ReplayTransport, line: TapeLine, rate: float) -> None:
        self.transport = transport
        self.line = line
        self.rate = rate
        self.file = -1
        self.start = 0

    def begin(self, device: Device, step: int) -> None:
        """Begin a tape if the step is drawn, as soon as the one before is done with."""
        if not is_drawn(self.rate, device.seed, device.name, step):
            return
        self.line.say("tape", step=step)
        while (file := self.line.wait_tape(step, self.transport.generation)) is None:
            self.transport.form()
        self.file = file
        state = state_of(device)
        self.start = -(-state.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._write(state, 0, self.start)
        self.transport.tape = Tape(device)

    def end(self, step: int) -> None:
        """End the tape of a step, if there is one, and say that it is whole."""
        tape, self.transport.tape = self.transport.tape, None
        if tape is None:
            return
        image = tape.image(self.transport.known_layouts())
        self._write(image, self.start, image.nbytes)
        os.close(self.file)
        self.line.say("taped", step=step, start=self.start)

    def _write(self, state: State, start: int, size: int) -> None:
        if os.fstat(self.file).st_size < start + size:
            os.ftruncate(self.file, start + size)
        state.copy_into(mmap.mmap(self.file, size, offset=start))


# --------------------------------------------------------------------------- computing again


class DifferentError(Exception):
    """Report what came out otherwise when it was computed again."""


class Again:
    """A transport without other ends, that compares a step with its tape; a `Transport`."""

    def __init__(self) -> None:
        self.device: Device | None = None
        self.tape: State | None = None
        self.got: dict[int, deque[str]] = {}
        self.sent: dict[int, deque[str]] = {}
        self.votes: deque[bool] = deque()
        self.layouts: dict[int, Layout] = {}
        self.compared: dict[int, int] = {}

    def play(self, tape: State, device: Device) -> None:
        """Be ready for the step of a tape."""
        self.device, self.tape = device, tape
        self.got, self.sent = _queues(tape.facts["got"]), _queues(tape.facts["sent"])
        self.votes = deque(tape.facts["votes"])
        self.compared.clear()
        known = tape.facts["channels"].items()
        self.layouts = {int(tag): _layout(found) for tag, found in known}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the tape in memory of its own, as it was."""
        assert self.tape is not None
        return unpack(self.tape.tensors[name].clone(), _layout(self.tape.facts["layouts"][name]))

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        """Nothing to post: all messages are here."""

    def recv(self, channel: Channel) -> Tensor:
        """Return the channel's next message."""
        return self.tensor(self.got[channel.tag].popleft())

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Compare a message with what was sent.

        Raises:
            DifferentError: it is another one.
        """
        layout = self.layouts.setdefault(channel.tag, Layout.of(tensor))
        due, number = self.sent.get(channel.tag), self.compared.get(channel.tag, 0)
        self.compared[channel.tag] = number + 1
        mine = _end_of(seal(pack(tensor, layout).to("cpu").view(torch.uint8)))
        if not due or due.popleft() != mine:
            raise DifferentError(f"message {number} of {channel}")

    def agree(self, what: Subject, digest: str, device: str) -> None:
        """The batch is the tape's, and was compared when it was read."""

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Return what all devices said."""
        return self.votes.popleft()

    def finish(self) -> None:
        """Compare the state after the step.

        Raises:
            DifferentError: a tensor is another one, or fewer messages were sent.
        """
        assert self.device is not None
        assert self.tape is not None
        if any(self.sent.values()):
            raise DifferentError("the number of messages sent")
        was, found = self.tape.facts["after"], checksums(self.device)
        for name in sorted(was.keys() | found.keys()):
            if was.get(name) != found.get(name):
                raise DifferentError(f"{name} after the step")


class Checker:
    """Compute steps of any device of a bundle again; it keeps the device of the last one.

    Args:
        bundle: whose devices they are.
        seed, threads, on_nan: as the devices have them; `threads` None: the plan's.
    """

    def __init__(self, bundle: Bundle, seed: int, threads: int | None, on_nan: str) -> None:
        self.bundle = bundle
        self.seed = seed
        self.threads = threads
        self.on_nan = on_nan
        self.rank = -1
        self.device: Device | None = None
        gc.collect()
        gc.freeze()  # torch's many objects: looking through them costs more than a step

    def check(self, asked: TapeCheck) -> str:
        """Compute a step again; return what came out otherwise, "" where nothing did."""
        try:
            room = mmap.mmap(asked.file, 0)
        finally:
            os.close(asked.file)
        view = memoryview(room)
        before = State.from_buffer(view[: asked.start])
        tape = State.from_buffer(view[asked.start :])
        device = self._device(asked.rank)
        transport = device.transport
        assert isinstance(transport, Again)
        restore(device, before)
        transport.play(tape, device)
        _put_batch(device, transport, tape)
        try:
            device.run_step(tape.step)
        except DifferentError as error:
            self.device = None  # it is within a step
            return str(error)
        finally:
            transport.tape = None  # gives its memory back, whoever still has the transport
        return ""

    def _device(self, rank: int) -> Device:
        torch.set_num_threads(self.threads or self.bundle.threads[rank])
        if self.device is None or rank != self.rank:
            self.device = None
            gc.collect()  # before there is another: they may be large, and refer to themselves
            here = torch.device("cpu")
            self.device = make_device(self.bundle, rank, Again(), self.seed, here)
            self.device.hooks, self.device.on_nan = Hooks(), self.on_nan
            self.rank = rank
        return self.device


def _put_batch(device: Device, transport: Again, tape: State) -> None:
    """Let a device's stream be where it was: nothing is read."""
    made: dict[str, Tensor] = {}
    for name in (name for names in tape.facts["parts"].values() for name in names):
        made.setdefault(name, transport.tensor(name) if name not in made else made[name])
    stream = device.stream
    stream.step, stream.sizes = tape.step, tuple(tape.facts["sizes"])
    stream.weights = tuple(tape.facts["weights"])
    stream.parts = {key: [made[n] for n in names] for key, names in tape.facts["parts"].items()}


def checksums(device: Device) -> dict[str, str]:
    """Return a checksum of each thing that a device's state has."""
    state = state_of(device)
    found = {name: checksum(tensor) for name, tensor in state.tensors.items()}
    facts = json.dumps(state.facts, sort_keys=True).encode()
    return {**found, "facts": hashlib.blake2b(facts, digest_size=WORD).hexdigest()}


def _end_of(sealed: Tensor) -> str:
    """Return the checksum that a sealed payload ends with."""
    return bytes(sealed[-WORD:].tolist()).hex()


def _queues(found: Iterable[tuple[int, str]]) -> dict[int, deque[str]]:
    made: dict[int, deque[str]] = {}
    for tag, text in found:
        made.setdefault(tag, deque()).append(text)
    return made


def _layout(found: tuple[Iterable[int], Iterable[int]]) -> Layout:
    shape, strides = found
    return Layout(tuple(shape), tuple(strides))


def check_tapes(
    bundle: Bundle, options: argparse.Namespace, seed: int, control: Control, asked: TapeCheck
) -> Duty:
    """Compute steps of others again until there is a device to become."""
    checker = Checker(bundle, seed, options.threads, options.on_nan)
    following: Duty | TapeCheck = asked
    while isinstance(following, TapeCheck):
        control.say("checked", number=following.number, text=checker.check(following))
        following = control.next_duty()
    return following
