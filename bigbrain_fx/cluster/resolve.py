"""cluster.json -> Cluster, and back.

This module decides what the file's entries mean together: presets, hosts, prices. `links` chooses
between links.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from bigbrain_fx.cluster import quantity
from bigbrain_fx.cluster.document import Document, JsonPath, read_document, read_text
from bigbrain_fx.cluster.faults import file_error
from bigbrain_fx.cluster.file import ClusterFile, DeviceEntry, HostEntry, OverheadsEntry
from bigbrain_fx.cluster.links import default_link, links_json, read_links
from bigbrain_fx.cluster.presets import PRESETS, UNITS, Preset, preset_name
from bigbrain_fx.cluster.quantity import BadValueError, nearest, quoted
from bigbrain_fx.cluster.stores import read_stores, store_json
from bigbrain_fx.cluster.timed import timed_kernels
from bigbrain_fx.cluster.zones import read_zones, zones_json
from bigbrain_fx.core import Cluster, Device, Host, Overheads
from bigbrain_fx.errors import InputError

DEFAULT_LAUNCH_S = {"cpu": 5e-6, "cuda": 15e-6}
"""On a CPU measured; of a GPU's process a quarter of the 59 us that an op takes it (see
`estimators/cuda_clock.py`), as `doctor` measures less than a module's call. Less with a card from
Ampere on, whose host is younger, too: see `Preset.launch_s`."""


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        InputError: cannot be read, is not JSON, or describes no cluster; names line and field.
    """
    return parse_cluster(read_text(path), str(path))


def parse_cluster(text: str, source: str) -> Cluster:
    """Turn the text of a cluster file into a Cluster.

    Args:
        text: JSON, as `schema()` describes it.
        source: what errors call the text; a path.

    Raises:
        InputError: the first fault, with its line and its path, `devices[2].memory`.
    """
    document = read_document(text, source)
    try:
        file = ClusterFile.model_validate(document.value)
    except ValidationError as error:
        raise file_error(document, error) from error
    devices = tuple(
        _device(document, ("devices", i), entry) for i, entry in enumerate(file.devices)
    )
    _check_names(document, devices)
    hosts = _hosts(document, file.hosts, devices)
    zones = read_zones(document, file.zones, devices)
    prices = ((entry.name, entry.price_per_hour_usd) for entry in file.devices)
    return Cluster(
        devices=devices,
        default_link=default_link(document, file.links),
        links=read_links(document, file.links, devices, zones),
        hosts=hosts,
        replicas=_replicas(document, file.replicas, devices),
        stores=read_stores(document, file.stores, devices),
        prices=tuple((name, usd) for name, usd in prices if usd is not None),
        zones=zones,
    )


# --------------------------------------------------------------------------- devices


def _device(document: Document, path: JsonPath, entry: DeviceEntry) -> Device:
    named = _preset(document, path, entry)
    card = PRESETS[named] if named else None
    kind = entry.kind or ("cuda" if card else None)
    memory_bytes = entry.memory or (card and card.memory_bytes)
    flops_per_s = entry.flops or (card and card.sustained_flops_per_s)
    memory_bytes_per_s = entry.memory_bandwidth or (card and card.sustained_memory_bytes_per_s)
    if not (kind and memory_bytes and flops_per_s and memory_bytes_per_s):
        raise _missing_fields(document, path, entry)
    said = card if entry.flops is None else None  # flops that are written are all that is known
    return Device(
        name=entry.name,
        host=entry.host,
        kind=kind,
        memory_bytes=memory_bytes,
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        launch_s=_launch_s(kind, card) if entry.launch is None else entry.launch,
        threads=entry.threads,
        overheads=_overheads(entry.overheads),
        half_flops_per_s=entry.half_flops or (said.sustained_half_flops_per_s if said else None),
        blas_bytes=entry.blas_workspace or (card.blas_bytes if card else None),
        tf32_flops_per_s=entry.tf32_flops or (said.sustained_tf32_flops_per_s if said else None),
        matmul_precision=entry.matmul_precision,
        lacks=card.lacks if card else (),
        preset=named,
        units=UNITS.get(named),
        processor=entry.processor,
        kernels=timed_kernels(document, path, entry),
        process_bytes=entry.process_memory,
    )


def _launch_s(kind: str, card: Preset | None) -> float:
    return (card and card.launch_s) or DEFAULT_LAUNCH_S[kind]


def _overheads(entry: OverheadsEntry | None) -> Overheads:
    if entry is None:
        return Overheads()
    return Overheads(
        entry.message, entry.message_bandwidth, entry.instruction, entry.step, entry.blocking
    )


def _preset(document: Document, path: JsonPath, entry: DeviceEntry) -> str:
    """Return the name of the entry's card; "" where it names none."""
    if entry.preset is None:
        return ""
    if entry.kind == "cpu":
        raise document.error(
            (*path, "kind"),
            f"the preset {quoted(entry.preset)} is a GPU, but kind is cpu",
            'delete "kind", or delete "preset" and write memory, flops and memory_bandwidth',
            code="BX1036",
        )
    try:
        return preset_name(entry.preset)
    except BadValueError as error:
        raise document.error((*path, "preset"), error.what, error.help, code=error.code) from error


def _missing_fields(document: Document, path: JsonPath, entry: DeviceEntry) -> InputError:
    examples: Mapping[str, tuple[object, str]] = {
        "kind": (entry.kind, '"cpu"'),
        "memory": (entry.memory, '"4GiB"'),
        "flops": (entry.flops, '"60GFLOP/s"'),
        "memory_bandwidth": (entry.memory_bandwidth, '"12GB/s"'),
    }
    missing = {name: example for name, (value, example) in examples.items() if value is None}
    wanted = ", ".join(f'"{name}": {example}' for name, example in missing.items())
    return document.error(
        (*path, next(iter(missing))),
        f"this field is missing, and device {quoted(entry.name)} has no preset to take it from",
        f'add {wanted}; or name a card, "preset": "h200"; or let `bigbrain-fx doctor` measure',
        code="BX1037",
    )


def _check_names(document: Document, devices: tuple[Device, ...]) -> None:
    """Refuse names that are the same, to a disk that does not tell cases apart either."""
    first: dict[str, int] = {}
    for i, device in enumerate(devices):
        before = first.setdefault(device.name.lower(), i)
        if before == i:
            continue
        same, name = f"devices[{before}].name", quoted(device.name)
        what = (
            f"duplicate of {same}: {name}"
            if device.name == devices[before].name
            else f"{name} differs from {same} in case only: on some disks both write one file"
        )
        raise document.error(
            ("devices", i, "name"), what, "give every device its own name", code="BX1038"
        )


# --------------------------------------------------------------------------- hosts


def _hosts(
    document: Document, entries: list[HostEntry], devices: tuple[Device, ...]
) -> tuple[Host, ...]:
    known = list(dict.fromkeys(device.host for device in devices))
    first: dict[str, int] = {}
    for i, entry in enumerate(entries):
        if entry.name not in known:
            near = nearest(entry.name, known)
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise document.error(
                ("hosts", i, "name"),
                f"no device is on a host {quoted(entry.name)}",
                f"{hint}known: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}",
                code="BX1039",
            )
        if entry.name in first:
            raise document.error(
                ("hosts", i, "name"),
                f"duplicate of hosts[{first[entry.name]}].name: {quoted(entry.name)}",
                "keep one of the two",
                code="BX1040",
            )
        first[entry.name] = i
    return tuple(Host(e.name, e.nic, e.memory_bandwidth, e.cores) for e in entries)


# --------------------------------------------------------------------------- replicas


def _replicas(
    document: Document, groups: list[list[str]], devices: tuple[Device, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each replica, once each is known and in one of them."""
    known = [device.name for device in devices]
    first: dict[str, int] = {}
    for i, group in enumerate(groups):
        if not group:
            raise document.error(
                ("replicas", i),
                "a replica without a device",
                "name one at least, or leave it out",
                code="BX1044",
            )
        for k, name in enumerate(group):
            document.require_known(("replicas", i, k), name, known)
            if name in first:
                raise document.error(
                    ("replicas", i, k),
                    f"device {quoted(name)} is already in replicas[{first[name]}]",
                    "a device computes for one replica: name it once",
                    code="BX1045",
                )
            first[name] = i
    return tuple(tuple(sorted(group, key=known.index)) for group in groups)


# --------------------------------------------------------------------------- and back


def to_json(cluster: Cluster) -> str:
    """Write a cluster as a cluster file; parsing it gives an equal Cluster.

    Raises:
        InputError: a value that has no text with a unit (an infinite bandwidth).
    """
    try:
        content: dict[str, object] = {
            "devices": [_device_json(each, cluster.price) for each in cluster.devices],
            "links": links_json(cluster),
        }
        if cluster.hosts:
            content["hosts"] = [_host_json(host) for host in cluster.hosts]
        if cluster.replicas:
            content["replicas"] = [list(group) for group in cluster.replicas]
        if cluster.stores:
            content["stores"] = [store_json(store) for store in cluster.stores]
        if cluster.zones:
            content["zones"] = zones_json(cluster)
    except BadValueError as error:
        raise InputError(
            f"cannot write the cluster: {error.what}", code="BX1046", help=error.help
        ) from error
    return json.dumps(content, indent=2) + "\n"


def _host_json(host: Host) -> dict[str, object]:
    rates = {"nic": host.nic_bytes_per_s, "memory_bandwidth": host.memory_bytes_per_s}
    found = {
        name: quantity.rate_text(rate, "B/s") for name, rate in rates.items() if rate is not None
    }
    cores = {} if host.cores is None else {"cores": host.cores}
    return {"name": host.name, **cores, **found}


def _device_json(device: Device, prices: Mapping[str, float]) -> dict[str, object]:
    usd = prices.get(device.name)
    own, half, blas = device.overheads, device.half_flops_per_s, device.blas_bytes
    tf32, products = device.tf32_flops_per_s, device.matmul_precision
    kernels, process = device.kernels, device.process_bytes
    return {
        "name": device.name,
        "host": device.host,
        "kind": device.kind,
        **({"preset": device.preset} if device.preset else {}),
        "memory": quantity.memory_text(device.memory_bytes),
        "flops": quantity.rate_text(device.flops_per_s, "FLOP/s"),
        **({"half_flops": quantity.rate_text(half, "FLOP/s")} if half is not None else {}),
        **({"tf32_flops": quantity.rate_text(tf32, "FLOP/s")} if tf32 is not None else {}),
        **({"matmul_precision": products} if products != "highest" else {}),
        "memory_bandwidth": quantity.rate_text(device.memory_bytes_per_s, "B/s"),
        **({} if process is None else {"process_memory": quantity.memory_text(process)}),
        **({"blas_workspace": quantity.memory_text(blas)} if blas is not None else {}),
        "launch": quantity.time_text(device.launch_s),
        "threads": device.threads,
        **({"processor": device.processor} if device.processor else {}),
        **({"kernels": {n: quantity.time_text(s) for n, s in kernels}} if kernels else {}),
        **({"overheads": _overheads_json(own)} if own != Overheads() else {}),
        **({} if usd is None else {"price_per_hour_usd": usd}),
    }


def _overheads_json(own: Overheads) -> dict[str, str | bool]:
    times = {"message": own.message_s, "instruction": own.instruction_s, "step": own.step_s}
    found: dict[str, str | bool] = {
        name: quantity.time_text(time_s) for name, time_s in times.items()
    }
    if own.blocking:
        found["blocking"] = True
    if own.message_bytes_per_s is not None:
        found["message_bandwidth"] = quantity.rate_text(own.message_bytes_per_s, "B/s")
    return found
