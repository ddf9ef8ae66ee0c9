"""Batches that the caller's own process sends: a device requests one, and waits for it.

While a device waits it is between two steps. It returns its state on request, connects anew to the
other devices after a death, and receives the order to stop.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load
from torch import Tensor

from .control import Control
from .protocol import BATCH
from .recipe import LearningRates, Optimizer

if TYPE_CHECKING:
    from .device import Device
    from .snapshots import OwnSnapshots


OF_OPTIMIZER = "optimizer."  # begins the names of entries that have options of its groups
OF_MODULE = "module."  # and of those that have numbers which the loop wrote into its module
_KEPT = 8  # steps whose options are known: an update may come later than the next batch


@dataclass(frozen=True)
class FedBatch:
    """Place of the batch of a step: in a file, which is this process's to close."""

    step: int
    file: int
    start: int
    size: int


class FedLine:
    """Messages and requests of the caller's process to a device.

    Attributes:
        batch: the newest that was not taken.
        state_at: the step that a requested in-memory checkpoint begins.
    """

    def __init__(self, control: Control) -> None:
        self.control = control
        self.batch: FedBatch | None = None
        self.state_at = -1
        control.listen_to({"batch": self._take, "state": self._ask})

    def _take(self, files: tuple[int, ...], step: int, start: int, size: int) -> None:
        self.batch, self.control.batch_bytes = FedBatch(step, files[0], start, size), size

    def _ask(self, files: tuple[int, ...], step: int) -> None:
        self.state_at = step

    def wait_fed(self, step: int, generation: int) -> None:
        """Wait until the batch of `step` is here, or there is something else to do before it.

        A device that is to stop looks whether that is before `step`; see `begin`.
        """
        with self.control.waiting("the caller's next batch", kind=BATCH), self.control.changed:
            self.control.changed.wait_for(
                lambda: (
                    self.has_batch(step)
                    or self.control.stops
                    or self.state_at == step
                    or self.control.generation > generation
                )
            )

    def has_batch(self, step: int) -> bool:
        """Whether the batch of a step is here."""
        return self.batch is not None and self.batch.step == step

    def take_batch(self, step: int) -> FedBatch:
        """Wait for the batch of a step that some device has begun."""
        with self.control.waiting("the caller's next batch", kind=BATCH), self.control.changed:
            self.control.changed.wait_for(lambda: self.has_batch(step))
            assert self.batch is not None
            taken, self.batch = self.batch, None
            return taken


def listen(control: Control) -> FedLine:
    """Receive the messages of the caller's process."""
    return FedLine(control)


class FedBatches:
    """The batches of a run, as the caller has sent them: all of them have the same entries.

    Attributes:
        options: for the newest steps the options of the caller's optimizer, by name.
        device: takes numbers that the caller's loop wrote into its module, before the step.
    """

    names_stay = True  # the first need not be read again, and could not: nobody keeps it

    def __init__(self, line: FedLine) -> None:
        self.line = line
        self.options: dict[int, dict[str, Tensor]] = {}
        self.device: Device | None = None

    def __call__(self, seed: int, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield batch after batch; each is waited for."""
        for step in count(start):
            batch = _read(self.line.take_batch(step))
            self.options[step] = _taken(batch, OF_OPTIMIZER)
            self.options.pop(step - _KEPT, None)
            self._write(_taken(batch, OF_MODULE))
            yield batch

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        held = self.device.state() if tensors and self.device is not None else {}
        with torch.no_grad():
            for name in tensors.keys() & held.keys():
                held[name].copy_(tensors[name])


def _taken(batch: dict[str, Tensor], begins: str) -> dict[str, Tensor]:
    """Take the entries of some names out of a batch."""
    named = [name for name in batch if name.startswith(begins)]
    return {name.removeprefix(begins): batch.pop(name) for name in named}


class FedRates(LearningRates):
    """Options of an optimizer's groups as the caller's own loop has set them for a step."""

    def __init__(self, optimizer: Optimizer | None, fed: FedBatches) -> None:
        super().__init__(optimizer)
        self.fed = fed

    def set(self, step: int) -> None:
        """Set the options of a step's update."""
        for name, values in self.fed.options.get(step, {}).items():
            for group, value in zip(self.groups, values.tolist(), strict=True):
                group[name] = _of_kind(group[name], value)


def _of_kind(before: Any, value: Any) -> Any:  # noqa: ANN401  # of any optimizer
    """Return a number, or several, of the group's type: a tuple, a tensor, an integer."""
    if isinstance(before, Tensor):
        return torch.full_like(before, value)
    if isinstance(value, list):
        return tuple(map(_of_kind, before, value))
    return int(value) if isinstance(before, int) and value.is_integer() else value


def rest(line: FedLine, device: Device, step: int, snapshots: OwnSnapshots) -> None:
    """Wait for the batch of `step`, or until the run is to stop."""
    control, transport = snapshots.control, snapshots.transport
    control.say("wants", step=step)
    while not line.has_batch(step):
        line.wait_fed(step, transport.generation)
        if control.generation > transport.generation:
            transport.form()
        elif line.state_at == step:
            line.state_at = -1
            snapshots.take_now(device, step)
        elif control.stops:
            return


def _read(batch: FedBatch) -> dict[str, Tensor]:
    base = batch.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    room = batch.start + batch.size - base
    try:
        with mmap.mmap(batch.file, room, access=mmap.ACCESS_READ, offset=base) as found:
            return dict(load(found[batch.start - base :]))
    finally:
        os.close(batch.file)
