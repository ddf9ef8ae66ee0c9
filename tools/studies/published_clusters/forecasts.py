"""Row -> the seconds and bytes that the product forecasts for the plan that was measured.

A plan is placed by hand: stages where the row has them, replicas of the row's devices, sums by
collectives. Devices have memory enough, so that a plan that was run is never refused.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tools.studies.published_clusters.rows import ClusterRow

Doc = dict[str, object]


@dataclass(frozen=True)
class ClusterSaid:
    """A forecast beside its row; `peak_bytes` of the fullest device's process."""

    row: ClusterRow
    step_s: float
    peak_bytes: int

    @property
    def error(self) -> float:
        """Forecast over measured step, less one."""
        return self.step_s / self.row.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same of memory, where it was measured."""
        return self.peak_bytes / self.row.peak_bytes - 1 if self.row.peak_bytes else None


def forecast(
    row: ClusterRow,
    graph: Graph,
    links: Mapping[tuple[str, str], Doc],
    *,
    nic: bool,
    profile: Path | None = None,
) -> ClusterSaid:
    """Forecast one row.

    Args:
        row: the measurement.
        graph: of its model.
        links: measured between hosts, by the cards at both ends.
        nic: whether devices of a host share what leaves it.
        profile: of the model's layers, as `--profile` takes it.
    """
    plan = planned(row, graph, cluster_of(row, links, nic=nic), profile)
    return ClusterSaid(row, plan.forecast.step_s, max(e.peak_bytes for e in plan.forecast.devices))


def planned(row: ClusterRow, graph: Graph, cluster: Cluster, profile: Path | None) -> Plan:
    """Plan a row's own strategy."""
    count, plain = row.replicas, "compiled" if row.fused else "analytical"
    options = Options(
        "naive" if not row.layers else "chain-dp",
        f"layers:{profile}" if profile else plain,
        micro_batches=row.batch // row.rows,
        replicas=count if count > 1 else None,
        replica_shares=(1,) * count if count > 1 else (),
        zero_stage=row.zero if count > 1 else 0,
        sum_order="backend" if count > 1 else None,
        tensor=row.tensor if row.tensor > 1 else None,
        pins=tuple(_pins(row, graph, cluster)),
    )
    return make_plan(replace(graph, batch=row.batch), cluster, Source(""), options)


def _pins(row: ClusterRow, graph: Graph, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield where the first replica has each layer: by the first device of its group."""
    first = list(cluster.device)[:: row.tensor]
    names = [name.split(".") for name in graph.param]
    last = 1 + max(int(parts[1]) for parts in names if parts[0] == "blocks")
    special = {0: _EMBEDDING, last + 1: _HEAD}
    known = {parts[0] for parts in names}
    for stage, (a, b) in enumerate(row.layers):
        for layer in range(a, b + 1):
            for name in special.get(layer, (f"blocks.{layer - 1}",)):
                if name.partition(".")[0] in known:
                    yield name, first[stage]


_EMBEDDING, _HEAD = ("tokens", "positions"), ("norm", "head")


# --------------------------------------------------------------------------- clusters


def measured_links(path: Path) -> dict[tuple[str, str], Doc]:
    """Return links between hosts of two cards: latency and rate through the ends of a sweep."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            if entry["scope"] == "inter" and entry["from_count"] == entry["to_count"] == "1":
                pair = entry["from_gpu"], entry["to_gpu"]
                found.setdefault(pair, []).append((float(entry["bytes"]), float(entry["seconds"])))
    return {pair: _line(sorted(points)) for pair, points in found.items()}


def _line(points: Sequence[tuple[float, float]]) -> Doc:
    (few, short_s), (many, long_s) = points[0], points[-1]
    rate = (many - few) / (long_s - short_s)
    latency_s = max(1e-6, short_s - few / rate)
    return {"bandwidth": f"{rate / 1e9:.4f}GB/s", "latency": f"{latency_s * 1e6:.1f}us"}


_OF_PRESET = {
    "gh200-96": "GH-96",
    "rtx-3090": "RTX-3090",
    "titan-rtx": "Titan-RTX",
    "rtx-2080-ti": "RTX-2080",
}
_FABRIC: Mapping[str, float] = {"h100": 50e9, "a100-40": 25e9, "a100-80": 25e9}
"""Bytes a second of a GPU's own NIC, where nobody measured: 400 and 200 Gbit/s a GPU."""
_SHARED = ("rtx-3090", "titan-rtx", "rtx-2080-ti")
"""Whose hosts have one NIC for all; others have one a GPU, and `nic` is the sum of them."""


def cluster_of(row: ClusterRow, links: Mapping[tuple[str, str], Doc], *, nic: bool) -> Cluster:
    """Return the devices of a row: replica by replica, stage by stage."""
    devices, hosts = [], _Hosts(row.host)
    for replica in range(row.replicas):
        for stage in row.cards:
            card = stage[replica]
            for _ in range(row.tensor):
                name, host = hosts.next(card)
                entry = {"name": name, "host": host, "preset": card, "memory": "2048GiB"}
                devices.append({**entry, "matmul_precision": "high", **_process(row, card)})
    default, between = _links(row, links, hosts)
    doc: Doc = {"devices": devices, "links": {"default": default, "between": between}}
    if nic:
        doc["hosts"] = [_host(row, name, default) for name in hosts.card]
    size = len(row.cards) * row.tensor
    names = [str(device["name"]) for device in devices]
    if row.replicas > 1:
        doc["replicas"] = [names[i : i + size] for i in range(0, len(names), size)]
    return parse_cluster(json.dumps(doc), row.name)


PROCESS = {"gh200-96": "4.1GB"}
"""What Megatron-DeepSpeed's process took beside tensors: 3.6 to 4.6 GB on GH200 (Sailor's own
simulator says 4.76 GB + 0.3 there, and 3 GB elsewhere)."""


def _process(row: ClusterRow, card: str) -> Doc:
    if row.runtime != "megatron-deepspeed":
        return {}
    return {"process_memory": PROCESS.get(card, "3GB"), "overheads": {"blocking": True}}


class _Hosts:
    """Hosts that are filled one after another, each with one kind of card: mutable."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.card: dict[str, str] = {}
        self._used: dict[str, int] = {}
        self._open: dict[str, str] = {}

    def next(self, card: str) -> tuple[str, str]:
        host = self._open.get(card)
        if host is None or self._used[host] == self.size:
            host = self._open[card] = f"h{len(self.card)}"
            self.card[host], self._used[host] = card, 0
        self._used[host] += 1
        return f"{host}g{self._used[host] - 1}", host


def _links(
    row: ClusterRow, links: Mapping[tuple[str, str], Doc], hosts: _Hosts
) -> tuple[Doc, list[Doc]]:
    """Return the link between most hosts, and those of others."""
    cards = sorted(set(hosts.card.values()))
    if cards[0] in _FABRIC:
        return {"bandwidth": f"{_FABRIC[cards[0]] / 1e9}GB/s", "latency": "10us"}, []
    known = {
        (a, b): links[_OF_PRESET[a], _OF_PRESET[b]]
        for a in cards
        for b in cards
        if (_OF_PRESET[a], _OF_PRESET[b]) in links
    }
    slowest = min(known.values(), key=lambda link: float(str(link["bandwidth"])[:-4]))
    return slowest, []


def _host(row: ClusterRow, name: str, link: Doc) -> Doc:
    rate = float(str(link["bandwidth"])[:-4])
    shares = 1 if row.cards[0][0] in _SHARED else row.host
    return {"name": name, "nic": f"{rate * shares}GB/s"}


@cache
def folder_links(folder: Path) -> dict[tuple[str, str], Doc]:
    """Return the measured links of a folder of rows."""
    return measured_links(folder / "sailor_network.csv")
