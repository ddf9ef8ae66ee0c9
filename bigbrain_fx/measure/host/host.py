"""Survey of a host, as a cluster, as JSON and as text.

This module starts nothing and measures nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bigbrain_fx.core import Cluster, Link, Overheads
from bigbrain_fx.measure.host.clusters import DeviceProbe, Findings, linked, rounded
from bigbrain_fx.measure.host.figures import (
    Kind,
    MatmulRate,
    Rates,
    are_alike,
    link_text,
    overheads_text,
    slowest,
    table_lines,
)


@dataclass(frozen=True)
class HostProbe(Findings):
    """Measurements of this host; planners get `cluster`, and `print` shows it.

    Attributes:
        devices: how many devices the cluster has.
        threads: CPU threads of each.
        cpu: what each of `devices` processes sustained while all of them computed.
        link: between two processes, over loopback.
        gpus: every GPU seen, as its own process found it while all of them computed; empty without
            CUDA. `memory_bytes` was free once that process had its context; of a host's only GPU,
            messages cost what CPU processes found. `name` is the card's.
        gpu_links: (number, number, link) of every pair of GPUs, between their processes.
        load: processes that wanted a core before the probe began (one-minute average).
        matmul: matrix products of each CPU device by size and dtype. Planners get `cpu`, and of
            the table the middle rate of large products in bfloat16.
        overheads: what a CPU device's process does beside computing.
        processor: the CPU's own name.
    """

    kind: Kind
    devices: int
    threads: int
    cores: int
    memory_bytes: int
    cpu: Rates
    link: Link
    gpus: tuple[DeviceProbe, ...]
    gpu_links: tuple[tuple[int, int, Link], ...]
    took_s: float
    load: float = 0.0
    matmul: tuple[MatmulRate, ...] = ()
    overheads: Overheads = field(default_factory=Overheads)
    processor: str = ""

    @property
    def cluster(self) -> Cluster:
        """The host as a cluster: devices d0, d1, ... on "localhost", figures to three digits.

        GPUs have the link of every pair where the pairs differ; the default is the slowest. A host
        that has one GPU has no pair to measure: the default is then the loopback.
        """
        if self.kind == "cuda":
            return self._cluster_of_gpus()
        share_bytes, kind = self.memory_bytes // self.devices, self.kind
        found = (
            DeviceProbe(
                f"d{number}",
                "localhost",
                self.threads,
                share_bytes,
                self.cpu,
                self.overheads,
                kind,
                processor=self._own_name,
                matmul=self.matmul,
            )
            for number in range(self.devices)
        )
        return Cluster(tuple(probe.device for probe in found), rounded(self.link))

    def _cluster_of_gpus(self) -> Cluster:
        gpus = enumerate(self.gpus[: self.devices])
        devices = tuple(replace(g, name=f"d{i}", processor=g.name).device for i, g in gpus)
        used = [entry for entry in self.gpu_links if max(entry[:2]) < self.devices]
        found = [link for *_, link in used]
        if are_alike(found):
            return Cluster(devices, rounded(slowest(found or [self.link])))
        return linked(devices, [(f"d{a}", f"d{b}", link) for a, b, link in used])

    @property
    def _own_name(self) -> str:
        """The processor's, unless threads took turns: then its rates say what each of them got."""
        return self.processor if self.devices * self.threads <= self.cores else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on figures that are doubtful."""
        notes = []
        wanted = self.devices * self.threads
        if self.kind == "cpu" and wanted > self.cores:
            notes.append(f"{wanted} threads share {self.cores} cores: each gets what it got here")
        if self.kind == "cpu" and 0 < len(self.gpus) < self.devices:
            count = len(self.gpus)
            notes.append(
                f"{count} of {self.devices} devices could be GPUs, so all are CPU devices: "
                f"`--devices {count} --kind cuda` describes the GPUs"
            )
        if self.load > self.cores / 2:
            notes.append(
                f"the host was busy (load {self.load:.1f} on {self.cores} cores): "
                "probe again when it is quiet"
            )
        return tuple(notes)

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.1f} GiB"
        plural = "process" if self.devices == 1 else "processes at once"
        lines = [
            f"host      {self.cores} cores, {memory} of memory for use",
            f"cpu       {self.cpu}",
            f"          each of {self.devices} {plural}, {self.threads} thread(s) each",
            f"loopback  {link_text(self.link)}",
            f"overheads {overheads_text(self.overheads)}",
            *table_lines(self.matmul),
            *self._gpu_lines(),
            *self._gpu_link_lines(),
            f"cluster   {self.devices} {self.kind} device(s), probed in {self.took_s:.1f} s",
        ]
        return "\n".join(itertools.chain(lines, (f"note      {note}" for note in self.notes)))

    def _gpu_lines(self) -> Iterator[str]:
        for i, gpu in enumerate(self.gpus):
            free = f"{gpu.memory_bytes / 2**30:.1f} GiB free"
            yield f"{f'gpu {i}':<10}{gpu.name}, {free}, {gpu.rates}"
            yield f"overheads {overheads_text(gpu.overheads)}"
            yield from table_lines(gpu.matmul)

    def _gpu_link_lines(self) -> list[str]:
        found = [link for *_, link in self.gpu_links]
        if found and are_alike(found):
            return [f"gpu-gpu   {link_text(slowest(found))}"]
        return [f"{f'gpu {a}-{b}':<10}{link_text(link)}" for a, b, link in self.gpu_links]
