"""Copies of a device's state in memory that its supervisor owns: they outlive the process.

There are two slots: one holds the newest step that all devices have (the epoch), the other takes
the next copy. A slot counts only once the supervisor knows that it is whole.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .control import Control
from .packets import Duty
from .replay import ReplayTransport
from .state import State, StateError, restore, state_of

if TYPE_CHECKING:
    from .checked_device import CheckedDevice

ROOM = 1.1  # a slot is made a little larger than the first state: optimizers add to it
MEASURED_STEP = 2  # of a run; the first ones are slower


class OwnSnapshots:
    """Take a snapshot every so many steps; restore one.

    Args:
        transport: of the device; its channels' layouts are kept with the state.
        control: the line to the supervisor.
        duty: the slots, and what is in them.
    """

    def __init__(self, transport: ReplayTransport, control: Control, duty: Duty) -> None:
        self.transport = transport
        self.control = control
        self.files = duty.files
        self.slots = list(duty.slots)
        self.maps: dict[int, mmap.mmap] = {}
        self.steps_run = 0

    def restore(self, device: CheckedDevice, step: int) -> None:
        """Put a device where its snapshot of `step` was taken."""
        number = self.slots.index(step)
        state = State.from_buffer(self._map(number, os.fstat(self.files[number]).st_size))
        restore(device, state)
        self.transport.start(step, state.facts["channels"])
        self.steps_run = int(state.facts["steps"])  # all tell their costs after the same step

    def after_step(self, device: CheckedDevice, step: int, step_s: float) -> None:
        """Take one if it is time; tell once what it costs, so that the interval can be chosen."""
        self.steps_run += 1
        every = self.control.every
        if not device.begins_empty:
            return
        if every is None and self.steps_run >= MEASURED_STEP:
            self._tell_cost(device, step_s)
            every = self._agreed()
        if every and _is_due(step + 1, every, device.empties_every) and step + 1 not in self.slots:
            self._take(device, step + 1)

    def take_now(self, device: CheckedDevice, step: int) -> None:
        """Take one at the beginning of `step`, unless it is there."""
        if step not in self.slots:
            self._take(device, step)

    def _agreed(self) -> int | None:
        """Wait for the interval: who heard of it a step later would lack a snapshot for ever."""
        self._wait(lambda: self.control.every is not None, "all devices' costs")
        return self.control.every

    def _wait(self, is_so: Callable[[], bool], text: str) -> None:
        """Wait until something is so, and meet the others anew meanwhile."""
        while not is_so() and not self.control.until(is_so, self.transport.generation, text):
            self.transport.form()

    def _take(self, device: CheckedDevice, step: int) -> None:
        self._wait(lambda: self._free() is not None, "all devices' in-memory checkpoints")
        number = self._free()
        assert number is not None
        self.slots[number] = -1
        size = self._copy(device, number)
        self.slots[number] = step
        self.control.say("snapshot", step=step, slot=number, bytes=size)

    def _free(self) -> int | None:
        """Return a slot that nobody will start from."""
        for number, step in enumerate(self.slots):
            if step < max(self.control.epoch, 0):
                return number
        return None

    def _copy(self, device: CheckedDevice, number: int) -> int:
        about = {"channels": self.transport.known_layouts(), "steps": self.steps_run}
        state = state_of(device, about)
        return state.copy_into(self._map(number, state.nbytes))

    def _tell_cost(self, device: CheckedDevice, step_s: float) -> None:
        """Measure a copy: the first one also gives the slot its memory, so the second counts."""
        number = self._free()
        if number is None:
            return
        self._copy(device, number)
        start = time.perf_counter()
        size = self._copy(device, number)
        copy_s = time.perf_counter() - start
        log = self.transport.step_bytes + self.control.batch_bytes  # both are kept until then
        self.control.say("cost", state=size, log=log, copy_s=copy_s, step_s=step_s)

    def _map(self, number: int, size: int) -> mmap.mmap:
        """Return a slot's memory, at least `size` bytes."""
        found = self.maps.get(number)
        if found is None or len(found) < size:
            room = os.fstat(self.files[number]).st_size
            if room < size:
                room = int(size * ROOM)
                _make_room(self.files[number], room)
            found = self.maps[number] = mmap.mmap(self.files[number], room)
        return found


def _is_due(step: int, every: int, empties_every: int) -> bool:
    """Whether a snapshot of `step` is the first that can be since one was due; of all devices."""
    can_be = step % empties_every == 0
    return can_be and step // every > (step - empties_every) // every


def _make_room(file: int, nbytes: int) -> None:
    """Give a slot its size.

    Raises:
        StateError: a limit forbids it; the others wait for each snapshot, so none is left out.
    """
    try:
        os.ftruncate(file, nbytes)
        if _is_on_disk(file):  # who writes to a mapped file on a full disk is killed
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        raise StateError(
            f"no memory for an in-memory checkpoint of {nbytes} bytes: {error.strerror or error}: "
            "raise the limit (`ulimit -f unlimited`), give another folder to "
            "--memory-checkpoint-dir, or run without replacing processes (--no-replay)",
            code="BX5149",
        ) from error


def _is_on_disk(file: int) -> bool:
    """Whether a file lacks the seals that those in memory have, and its room can be taken."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return True
    return False
