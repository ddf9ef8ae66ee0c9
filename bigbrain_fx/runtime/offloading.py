"""A device's store: opened before its weights are loaded, filled once there is an optimizer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .checkpoint_options import add_earlier
from .launcher import as_called
from .stores import StoredState, StoreRoom, room_of

if TYPE_CHECKING:
    from .device import Device


def open_store(device: Device, folder: str | None) -> StoreRoom:
    """Open a device's store, before weights are loaded, which may lie there; None: the planned one.

    Raises:
        StoreError: it cannot be used, or lacks the room.
    """
    where = None if device.store is None else folder or device.store
    device.room = room_of(where, device.name, device.store_bytes)
    if "weights" in device.offload:
        from .stored_weights import StoredWeights, WeightsByVisit  # only bundles that offload them

        device.weights = StoredWeights(device.room)
        device.add(WeightsByVisit(), outermost=True)
    return device.room


def offload_to(device: Device, folder: str | None) -> None:
    """Let what else is offloaded lie in the device's store, which is opened if need be.

    Raises:
        StoreError: it cannot be used, or lacks the room.
    """
    room = device.room or open_store(device, folder)
    if device.optimizer is not None and "state" in device.offload:
        device.stored = StoredState(device.optimizer, room, device.weights)
    if device.saving:
        from .stored_activations import ActivationStore  # only bundles that offload them

        device.saved = ActivationStore(room)
        device.add(device.saved)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the option for where a device's store is."""
    add_earlier(parser, "--store", as_called)  # earlier name
    text = "a folder for what is offloaded (default: the plan's), on this host"
    parser.add_argument("--offload-dir", dest="store", type=as_called, help=text)
