"""Batches that the caller's own process sends: a device asks for one, and rests until it is there.

While a device rests it is between two steps: it gives its state to whom asks for it, meets the
others anew if one of them has died, and hears that the run is to stop.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from safetensors.torch import load
from torch import Tensor

from .control import Control
from .packets import FedBatch

if TYPE_CHECKING:
    from .device import Device
    from .snapshots import OwnSnapshots


class FedBatches:
    """The batches of a run, as the caller has sent them: all of them have the same entries."""

    names_stay = True  # the first need not be read again, and could not: nobody keeps it

    def __init__(self, control: Control) -> None:
        self.control = control

    def __call__(self, seed: int, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield batch after batch; each is waited for."""
        for step in count(start):
            yield _read(self.control.take_batch(step))


def rest(device: Device, step: int, snapshots: OwnSnapshots) -> None:
    """Wait for the batch of `step`, or until the run is to stop."""
    control, transport = snapshots.control, snapshots.transport
    control.say("wants", step=step)
    while not control.has_batch(step):
        control.wait_fed(step, transport.generation)
        if control.generation > transport.generation:
            transport.form()
        elif control.state_at == step:
            control.state_at = -1
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
