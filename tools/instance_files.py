"""Public benchmark files -> Instance: dnn-partitioning, pipedream and piper.

Files are read where they lie: nothing of them is kept here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import InputError
from tools.instances import Instance, Node
from tools.load_solvers.problem import Kind

PIPEDREAM_DEVICES = 4
PIPEDREAM_BYTES_PER_MS = 25e9 / 8 / 1e3  # 25 Gbit/s, as in the servers of the paper
PIPEDREAM_MEMORY_BYTES = 16 * 2**30


def read(path: Path) -> Instance:
    """Read one file of any of the three formats.

    Raises:
        InputError: it is none of them.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix == ".txt":
        return _pipedream(path.parent.name, text)
    try:
        found = json.loads(text)
        if "maxFPGAs" in found:
            return _dnn_partitioning("_".join((path.parent.name, path.stem)), found)
        if "maxDevices" in found:
            return _piper(path.stem, found)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"not an instance: {error}", at=str(path)) from error
    raise InputError("not an instance of dnn-partitioning, piper or pipedream", at=str(path))


def find(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of every instance below a folder, sorted.

    Raises:
        InputError: there is none.
    """
    files = [*folder.glob("**/*-inputs/*/*.json"), *folder.glob("**/piper/inputs/*.json")]
    files += folder.glob("**/pipedream/*/graph.txt")
    if not files:
        raise InputError(f"no instances below {folder}", help="give the folder of the public data")
    for path in sorted(files):
        yield name_of(path), path


def name_of(path: Path) -> str:
    """Return what an instance is called: "throughput/LayerGraphs_bert24_inference"."""
    if path.suffix == ".txt":
        return f"pipedream/{path.parent.name}"
    if path.parent.name == "inputs":
        return f"piper/{path.stem}"
    task = path.parent.parent.name.removesuffix("-inputs")
    return f"{task}/{path.parent.name}_{path.stem}"


def transfers_in_seconds(name: str) -> bool:
    """Whether an instance's file has milliseconds of work, and seconds of transfers.

    Those of whole layers, for throughput: their transfers are a thousandth of what the latency
    files of the same models have. Published values were made from the files as they are, so they
    are read so; `in_milliseconds` mends one.
    """
    return name.startswith("throughput/LayerGraphs_")


def in_milliseconds(instance: Instance) -> Instance:
    """Return the instance with transfers that were seconds as milliseconds, under another name."""
    edges = tuple((a, b, 1e3 * cost) for a, b, cost in instance.edges)
    return replace(instance, name=f"{instance.name}+ms", edges=edges)


def _dnn_partitioning(name: str, found: dict[str, Any]) -> Instance:
    limit = float(found["maxSizePerFPGA"])
    kinds = (
        Kind("accelerator", int(found["maxFPGAs"]), limit),
        Kind("cpu", int(found["maxCPUs"])),
    )
    entries: list[dict[str, Any]] = list(found["nodes"])
    number = {entry["id"]: i for i, entry in enumerate(entries)}
    nodes = tuple(_dnn_node(entry) for entry in entries)
    edges = tuple(
        (number[e["sourceId"]], number[e["destId"]], float(e["cost"])) for e in found["edges"]
    )
    return Instance(name, nodes, edges, kinds, (1.0, 0.0))


def _dnn_node(entry: dict[str, Any]) -> Node:
    runs = bool(entry["supportedOnFpga"])
    accelerator = float(entry["fpgaLatency"]) if runs else float("inf")
    color = entry.get("colorClass")
    return Node(
        str(entry.get("name", entry["id"])),
        (accelerator, float(entry["cpuLatency"])),
        float(entry.get("size", 0.0)),
        bool(entry["isBackwardNode"]),
        None if color is None else int(color),
    )


def _piper(name: str, found: dict[str, Any]) -> Instance:
    """One tensor degree, nothing recomputed, one sample in flight; a training pass there and back.

    Times are milliseconds per sample, bytes per sample cross an edge twice (activation, gradient).
    """
    bytes_per_ms = float(found["bandwidth"]) / 1e3
    entries: list[dict[str, Any]] = list(found["nodes"])
    number = {entry["id"]: i for i, entry in enumerate(entries)}
    nodes = []
    for entry in entries:
        table = {c["id"]: c for c in entry["TMPCs"]["1"]}
        plain = table["vanilla"]
        held = float(plain["memoryUsageA"]) + float(plain["memoryUsageB"])
        nodes.append(Node(str(entry["name"]), (float(plain["timePerSample"]),), held))
    edges = tuple(
        (number[e["sourceId"]], number[e["destId"]], 2 * e["communicationCost"] / bytes_per_ms)
        for e in found["edges"]
    )
    limit = float(found["maxMemoryPerDevice"])
    kind = Kind("accelerator", int(found["maxDevices"]), limit)
    return Instance(name, tuple(nodes), edges, (kind,), (1.0,))


_NUMBER = re.compile(r"(\w+)=(\[[^\]]*\]|[-\d.e+]+)")


def _pipedream(name: str, text: str) -> Instance:
    """Read a profile: milliseconds of a mini-batch, bytes of activations and parameters.

    A file has no devices: 4 of 16 GiB on 25 Gbit/s are assumed. An edge carries its maker's output
    there and its gradient back. Weights are held with their gradients and two moments.
    """
    nodes: dict[str, Node] = {}
    sent: dict[str, float] = {}
    edges: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        parts = line.strip().split(" -- ")
        if line.startswith("\t"):
            edges.append((parts[0], parts[1]))
            continue
        found = {key: _total(value) for key, value in _NUMBER.findall(parts[2])}
        sent[parts[0]] = found["activation_size"]
        time = found["forward_compute_time"] + found["backward_compute_time"]
        held = 4 * found["parameter_size"] + found["activation_size"]
        nodes[parts[0]] = Node(parts[1], (time,), held)
    number = {key: i for i, key in enumerate(nodes)}
    kind = Kind("accelerator", PIPEDREAM_DEVICES, PIPEDREAM_MEMORY_BYTES)
    return Instance(
        name,
        tuple(nodes.values()),
        tuple((number[a], number[b], 2 * sent[a] / PIPEDREAM_BYTES_PER_MS) for a, b in edges),
        (kind,),
        (1.0,),
    )


def _total(text: str) -> float:
    """Add up "[6291456.0; 1.0]", or read one number."""
    return sum(float(part) for part in re.split(r"[;,]", text.strip("[]")) if part.strip())
