"""All devices of a bundle in one process, whose steps are taped and computed again; with faults.

What tapes and compares is the bundle's own `runtime/suspicion.py`; a supervised run has it in
processes of their own, here one can count thousands of steps.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FACTOR = 1.5


@dataclass(frozen=True)
class Wrong:
    """What a device computes wrong in a step, and never says.

    Attributes:
        kind: activation or gradient (one that it sends is 1.5 times what it should be), bit (the
            lowest of one element that it sends is flipped), or weight (one element, after the
            update, is the next number).
        place: which message of the step, or which parameter; taken modulo how many there are.
    """

    device: str
    step: int
    kind: str
    place: int = 0


@dataclass
class Counted:
    """What came out of a run.

    Attributes:
        checked: (device, step) of what was computed again.
        found: (device, step) -> what came out otherwise.
        struck: the faults that found their place.
        plain_s, tape_s, check_s: processor time of the steps, of their tapes, of the checks.
    """

    checked: list[tuple[str, int]] = field(default_factory=list)
    found: dict[tuple[str, int], str] = field(default_factory=dict)
    struck: set[Wrong] = field(default_factory=set)
    plain_s: float = 0.0
    tape_s: float = 0.0
    check_s: float = 0.0


class Rig:
    """A bundle's devices, ready to run; `bundle` is its train.py, imported."""

    def __init__(self, bundle: ModuleType) -> None:
        self.bundle = bundle.BUNDLE
        names = ("bundle", "local", "suspicion", "channel", "mesh", "control")
        self.runtime = {name: importlib.import_module(f"runtime.{name}") for name in names}
        self.devices = [cls.name for cls in self.bundle.devices]

    def run(self, steps: int, rate: float, wrongs: Sequence[Wrong] = (), draw: int = 0) -> Counted:
        """Train; tape and check a share of the devices' steps, as seed `draw` has it."""
        hub = self.runtime["local"].Hub(dict.fromkeys(self.devices, 1))  # threads: the checker's
        counted, again = Counted(), self._checker()
        programs = {
            name: partial(self._train, hub, rank, steps, rate, wrongs, draw, again, counted)
            for rank, name in enumerate(self.devices)
        }
        start = time.process_time()
        hub.run(programs)
        counted.plain_s = time.process_time() - start - counted.tape_s - counted.check_s
        return counted

    def _checker(self) -> Any:  # of the bundle's own runtime
        return self.runtime["suspicion"].Checker(self.bundle, self.bundle.seed, 1, "stop")

    def _train(
        self,
        hub: Any,
        rank: int,
        steps: int,
        rate: float,
        wrongs: Sequence[Wrong],
        draw: int,
        checker: Any,
        counted: Counted,
    ) -> None:
        here = torch.device("cpu")
        inner = self.runtime["local"].LocalTransport(hub)
        mine = {w.step: w for w in wrongs if w.device == self.devices[rank]}
        transport = Taping(inner, self.runtime, mine, counted)
        device = self.runtime["bundle"].make_device(
            self.bundle, rank, transport, self.bundle.seed, here
        )
        transport.device = device
        control = _Line(self.runtime["suspicion"].TapeCheck, rank)
        recorder = self.runtime["suspicion"].TapeRecorder(transport, control, rate)
        is_drawn = self.runtime["suspicion"].is_drawn
        for step in range(steps):
            drawn = is_drawn(rate, draw, device.name, step)
            recorder.rate = float(drawn)  # drawn by `draw`, not by the training's seed
            with _timed(counted, "tape_s"):
                recorder.begin(device, step)
            device.run_step(step)
            with _timed(counted, "tape_s"):
                recorder.end(step)
            if drawn:
                with _timed(counted, "check_s"):
                    text = checker.check(control.asked)
                counted.checked.append((device.name, step))
                if text:
                    counted.found[device.name, step] = text


class Taping:
    """A transport within a process that tells a tape what passes, and sends what is wrong."""

    generation = 0

    def __init__(
        self,
        inner: Any,
        runtime: dict[str, ModuleType],
        wrongs: dict[int, Wrong],
        counted: Counted,
    ) -> None:
        self.inner, self.runtime, self.wrongs, self.counted = inner, runtime, wrongs, counted
        self.tape: Any = None
        self.device: Any = None
        self.layouts: dict[int, Any] = {}
        self.seen: dict[str, int] = {}

    def known_layouts(self) -> dict[str, Any]:
        """Return the layouts of messages, by tag."""
        return {str(tag): (found.shape, found.strides) for tag, found in self.layouts.items()}

    def begin_step(self, channels: Any) -> None:
        """Pass on."""
        self.seen.clear()
        self.inner.begin_step(channels)

    def send(self, channel: Any, tensor: Tensor) -> None:
        """Send, wrong where that is planned, and tell the tape."""
        tensor = self._struck(channel.kind, tensor)
        layout = self.runtime["channel"].Layout.of(tensor)
        layout = self.layouts.setdefault(channel.tag, layout)
        if self.tape is not None:
            with _timed(self.counted, "tape_s"):
                flat = self.runtime["channel"].pack(tensor, layout).view(torch.uint8)
                self.tape.tell(channel, self.runtime["mesh"].seal(flat))
        self.inner.send(channel, tensor)

    def recv(self, channel: Any) -> Tensor:
        """Receive, and tell the tape."""
        tensor: Tensor = self.inner.recv(channel)
        if self.tape is not None:
            with _timed(self.counted, "tape_s"):
                self.tape.hear(channel, tensor)
        return tensor

    def agree(self, what: str, digest: str, device: str) -> None:
        """Pass on."""
        self.inner.agree(what, digest, device)

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Pass on, and tell the tape."""
        all_say: bool = self.inner.vote(step, device, yes, names)
        if self.tape is not None:
            self.tape.votes.append(all_say)
        return all_say

    def finish(self) -> None:
        """Spoil a weight where that is planned, and end the tape."""
        wrong = self.wrongs.get(self.device.step)
        if wrong is not None and wrong.kind == "weight":
            parameters = list(self.device.parameters.values())
            _spoil(parameters[wrong.place % len(parameters)].detach())
            self.counted.struck.add(wrong)
        if self.tape is not None:
            with _timed(self.counted, "tape_s"):
                self.tape.end()
        self.inner.finish()

    def _struck(self, kind: str, tensor: Tensor) -> Tensor:
        wrong = self.wrongs.get(self.device.step)
        number = self.seen[kind] = self.seen.get(kind, -1) + 1
        if wrong is None or wrong.kind == "weight" or wrong in self.counted.struck:
            return tensor
        if wrong.kind not in (kind, "bit") or number != wrong.place % self._many(kind):
            return tensor
        self.counted.struck.add(wrong)
        if wrong.kind == "bit":
            return _spoil(tensor.clone())
        return tensor * FACTOR

    def _many(self, kind: str) -> int:
        return int(self.device.micro_batches) if kind in ("activation", "gradient") else 1


class _Line:
    """The line to a supervisor that has one tape at a time, and gives it to a checker at once."""

    def __init__(self, check: Any, rank: int) -> None:
        self.check, self.rank = check, rank
        self.file = os.memfd_create("tape")
        self.asked: Any = None

    def say(self, say: str, **facts: int) -> None:
        """Hear that a tape is whole."""
        if say == "taped":
            self.asked = self.check(self.rank, os.dup(self.file), facts["start"], 0)

    def wait_tape(self, step: int, generation: int) -> int:
        """Return the memory for a tape."""
        return os.dup(self.file)

    def __del__(self) -> None:
        os.close(self.file)


def _spoil(tensor: Tensor) -> Tensor:
    """Flip the lowest bit of one element, in place: no norm shows it."""
    whole = tensor.view(-1)[:1]
    whole.copy_(torch.nextafter(whole, torch.full_like(whole, torch.inf)))
    return tensor


@contextmanager
def _timed(counted: Counted, what: str) -> Iterator[None]:
    start = time.process_time()
    try:
        yield
    finally:
        setattr(counted, what, getattr(counted, what) + time.process_time() - start)
