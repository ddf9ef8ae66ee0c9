"""Stores of a cluster file -> nouns, and back: where devices keep what memory cannot hold."""

from __future__ import annotations

from bigbrain_fx.cluster import quantity
from bigbrain_fx.cluster.document import Document, JsonPath
from bigbrain_fx.cluster.file import StoreEntry
from bigbrain_fx.cluster.quantity import quoted
from bigbrain_fx.core import Device, DeviceStore


def read_stores(
    document: Document, entries: list[StoreEntry], devices: tuple[Device, ...]
) -> tuple[DeviceStore, ...]:
    """Return the stores, once each is of one device that is there.

    Raises:
        InputError: names the entry and its fault.
    """
    kind = {device.name: device.kind for device in devices}
    first: dict[str, int] = {}
    for i, entry in enumerate(entries):
        path: JsonPath = ("stores", i)
        document.require_known((*path, "device"), entry.device, list(kind))
        for field, key in (("name", f"name {entry.name}"), ("device", f"device {entry.device}")):
            if key in first:
                raise document.error(
                    (*path, field),
                    f"{quoted(getattr(entry, field))} is already in stores[{first[key]}]",
                    "give every store a name and a device of its own",
                    code="BX1047",
                )
            first[key] = i
        if entry.folder is None and kind[entry.device] == "cpu":
            raise document.error(
                path,
                f"the store of {quoted(entry.device)} has no folder, and its host's memory is what "
                "a cpu device computes in",
                'add "folder": "/scratch", a folder on a disk',
                code="BX1048",
            )
    return tuple(
        DeviceStore(e.name, e.device, e.capacity, e.bandwidth, e.folder or "") for e in entries
    )


def store_json(store: DeviceStore) -> dict[str, object]:
    """Write a store as an entry of a cluster file."""
    return {
        "name": store.name,
        "device": store.device,
        "capacity": quantity.memory_text(store.capacity_bytes),
        "bandwidth": quantity.rate_text(store.bytes_per_s, "B/s"),
        **({"folder": store.folder} if store.folder else {}),
    }
