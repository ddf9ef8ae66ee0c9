"""This host -> a cluster.json that forecasts can be made with.

This room decides what to measure and puts the figures together; it prints nothing.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bigbrain_fx.cluster import to_json
from bigbrain_fx.core import Cluster, Device, Link, Overheads
from bigbrain_fx.doctor.fleet import Fleet, run
from bigbrain_fx.doctor.limits import usable_cores, usable_memory_bytes
from bigbrain_fx.errors import InputError

_MIB = 2**20
_LARGE_PRODUCT = 2**25  # rows x inner x columns
_QUICK_WINDOW_S = 0.25
_THOROUGH_WINDOW_S = 2.0
_QUICK_DEADLINE_S = 60.0
_THOROUGH_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device sustains: FP32 matrix products, copies (read and write), tiny ops."""

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float

    def __str__(self) -> str:
        return (
            f"{self.flops_per_s / 1e9:.1f} GFLOP/s, {self.memory_bytes_per_s / 1e9:.1f} GB/s, "
            f"{self.launch_s * 1e6:.1f} us per op"
        )


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """What a product of (rows, inner) by (inner, columns) sustains in one dtype."""

    dtype: str
    rows: int
    inner: int
    columns: int
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the host; its memory is what was free when it was probed."""

    name: str
    memory_bytes: int
    rates: Rates
    matmul: tuple[MatmulRate, ...] = ()


@dataclass(frozen=True)
class HostProbe:
    """What was measured on this host; `cluster` is what planners get, `print` shows it.

    Attributes:
        devices: how many devices the cluster has.
        threads: CPU threads of each.
        cpu: what each of `devices` processes sustained while all of them computed.
        link: between two processes, over loopback.
        gpus: every GPU seen; empty without CUDA.
        gpu_link: between GPUs 0 and 1; None with fewer.
        load: processes that wanted a core before the probe began (one-minute average).
        matmul: matrix products of each CPU device by size and dtype; planners get `cpu`, and of
            the table the middle rate of large products in bfloat16.
        overheads: what a device's process does beside computing.
    """

    kind: Literal["cpu", "cuda"]
    devices: int
    threads: int
    cores: int
    memory_bytes: int
    cpu: Rates
    link: Link
    gpus: tuple[Gpu, ...]
    gpu_link: Link | None
    took_s: float
    load: float = 0.0
    matmul: tuple[MatmulRate, ...] = ()
    overheads: Overheads = field(default_factory=Overheads)

    @property
    def cluster(self) -> Cluster:
        """The host as a cluster: devices d0, d1, ... on "localhost", figures to three digits."""
        link = self.link
        if self.kind == "cuda":
            devices = [self._of(i, gpu) for i, gpu in self._used_gpus]
            link = self.gpu_link or self.link
        else:
            share_bytes = self.memory_bytes // self.devices
            own = _half_flops_per_s(self.matmul)
            devices = [self._device(i, share_bytes, self.cpu, own) for i in range(self.devices)]
        return Cluster(
            tuple(devices), Link(three_digits(link.latency_s), three_digits(link.bytes_per_s))
        )

    @property
    def _used_gpus(self) -> Sequence[tuple[int, Gpu]]:
        return list(enumerate(self.gpus[: self.devices]))

    def _of(self, index: int, gpu: Gpu) -> Device:
        return self._device(index, gpu.memory_bytes, gpu.rates, _half_flops_per_s(gpu.matmul))

    def _device(
        self, index: int, memory_bytes: int, rates: Rates, half_flops_per_s: float | None
    ) -> Device:
        return Device(
            name=f"d{index}",
            host="localhost",
            kind=self.kind,
            memory_bytes=memory_bytes // _MIB * _MIB,
            flops_per_s=three_digits(rates.flops_per_s),
            memory_bytes_per_s=three_digits(rates.memory_bytes_per_s),
            launch_s=three_digits(rates.launch_s),
            threads=self.threads,
            overheads=self.overheads,
            half_flops_per_s=None if half_flops_per_s is None else three_digits(half_flops_per_s),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know before trusting the figures."""
        notes = []
        wanted = self.devices * self.threads
        if self.kind == "cpu" and wanted > self.cores:
            notes.append(f"{wanted} threads share {self.cores} cores: each gets what it got here")
        if self.load > self.cores / 2:
            notes.append(
                f"the host was busy (load {self.load:.1f} on {self.cores} cores): "
                "probe again when it is quiet"
            )
        return tuple(notes)

    @property
    def measured(self) -> dict[str, object]:
        """Everything that was measured, for JSON; `cluster` has less, and to three digits."""
        content = asdict(self)
        return {key: value for key, value in content.items() if key != "gpu_link" or value}

    def write(self, path: str | Path, force: bool = False) -> None:
        """Write the cluster file: see `write_cluster`."""
        write_cluster(self.cluster, path, force)

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.1f} GiB"
        plural = "process" if self.devices == 1 else "processes at once"
        lines = [
            f"host      {self.cores} cores, {memory} of memory for use",
            f"cpu       {self.cpu}",
            f"          each of {self.devices} {plural}, {self.threads} thread(s) each",
            f"loopback  {link_text(self.link)}",
            f"overheads {overheads_text(self.overheads)}",
            *_table_lines(self.matmul),
        ]
        for i, gpu in enumerate(self.gpus):
            free = f"{gpu.memory_bytes / 2**30:.1f} GiB free"
            lines += [f"gpu {i}     {gpu.name}, {free}, {gpu.rates}", *_table_lines(gpu.matmul)]
        lines += [f"gpu-gpu   {link_text(self.gpu_link)}"] if self.gpu_link else []
        lines += [f"cluster   {self.devices} {self.kind} device(s), probed in {self.took_s:.1f} s"]
        return "\n".join(itertools.chain(lines, (f"note      {note}" for note in self.notes)))


def _half_flops_per_s(table: Sequence[MatmulRate]) -> float | None:
    """Return the middle rate of bfloat16, small products left out; None if none was measured."""
    halves = [rate for rate in table if rate.dtype == "bfloat16"]
    large = [r.flops_per_s for r in halves if r.rows * r.inner * r.columns >= _LARGE_PRODUCT]
    return statistics.median(large) if large else None


def write_cluster(cluster: Cluster, path: str | Path, force: bool = False) -> None:
    """Write a cluster file; an existing file stays unless `force`.

    Raises:
        InputError: the file exists, or cannot be written.
    """
    text = to_json(cluster)
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(
            "the cluster file exists already", at=str(path), help="add --force to replace it"
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot write the cluster file: {error.strerror}",
            at=str(path),
            help="name a file in a folder that exists and can be written",
        ) from error


def probe(
    threads: int = 1,
    devices: int = 2,
    quick: bool = True,
    kind: Literal["cpu", "cuda"] | None = None,
) -> HostProbe:
    """Measure this host as `devices` devices would use it: all at once.

    Processes of one host share its memory bandwidth, caches and cores, so the rates are those of
    `devices` processes that compute at the same time. The link is a ping-pong of two processes
    over gloo on 127.0.0.1. GPUs, where there are any, are probed too.

    Args:
        threads: CPU threads of each device.
        devices: how many devices the cluster shall have.
        quick: some ten seconds; otherwise about a minute, for steadier figures.
        kind: what the devices are; None takes GPUs where there are `devices` of them, else CPU
            processes. "cpu" leaves GPUs alone.

    Raises:
        InputError: numbers that this host cannot do.
        ProbeError: a process failed or hung.
    """
    cores = usable_cores()
    _check(threads, devices, cores)
    memory_bytes, load = usable_memory_bytes(), os.getloadavg()[0]  # before our own processes
    start = time.monotonic()
    results = run(_fleet(threads, devices, cores, quick, gpus=kind != "cpu"))
    gpus = tuple(_gpu(entry) for entry in results[0].get("gpus", ()))
    if kind == "cuda":
        _require_gpus(devices, len(gpus))
    return HostProbe(
        kind=kind or ("cuda" if len(gpus) >= devices else "cpu"),
        devices=devices,
        threads=threads,
        cores=cores,
        memory_bytes=memory_bytes,
        cpu=_middle_rates(results[:devices]),
        link=link_between(results, 0, 1),
        gpus=gpus,
        gpu_link=_gpu_link(results[0]),
        took_s=time.monotonic() - start,
        load=load,
        matmul=_middle_table(results[:devices]),
        overheads=overheads_of(results[:2]),
    )


def _check(threads: int, devices: int, cores: int) -> None:
    if not 1 <= threads <= cores:
        raise InputError(
            f"expected 1 to {cores} threads, as this host has {cores} cores, found {threads}",
            at="--threads",
            help="--threads 1",
        )
    most = 4 * cores
    if not 1 <= devices <= most:
        raise InputError(
            f"expected 1 to {most} devices on {cores} cores, found {devices}",
            at="--devices",
            help=f"probe with --devices {min(2, most)}; "
            "for a larger cluster copy the entries and change their hosts",
        )


def _fleet(threads: int, devices: int, cores: int, quick: bool, gpus: bool) -> Fleet:
    """Return the processes that measure: one for each device, and two at least for the link."""
    world = max(2, devices)
    return Fleet(
        names=tuple(f"d{i}" for i in range(world)),
        threads=(threads,) * world,
        busy=devices,
        linked=2,
        window_s=_QUICK_WINDOW_S if quick else _THOROUGH_WINDOW_S,
        deadline_s=_QUICK_DEADLINE_S if quick else _THOROUGH_DEADLINE_S,
        gpus=gpus,
        table=True,
        shared_cores=cores < 2 * threads * devices,
    )


def _require_gpus(devices: int, found: int) -> None:
    if found < devices:
        raise InputError(
            f"expected {devices} GPUs, found {found}",
            at="--devices",
            help=f"ask for {found} devices" if found else "probe the CPU instead",
        )


def _middle_rates(results: Sequence[Mapping[str, Any]]) -> Rates:
    def middle(key: str) -> float:
        return statistics.median(float(result[key]) for result in results)

    return Rates(middle("flops_per_s"), middle("memory_bytes_per_s"), middle("launch_s"))


def _middle_table(results: Sequence[Mapping[str, Any]]) -> tuple[MatmulRate, ...]:
    """Take the middle of what the processes found, entry by entry."""
    tables = [result["matmul"] for result in results]
    return tuple(
        MatmulRate(
            **{**rows[0], "flops_per_s": statistics.median(row["flops_per_s"] for row in rows)}
        )
        for rows in zip(*tables, strict=True)
    )


def _table_lines(table: Sequence[MatmulRate]) -> list[str]:
    """Show, for each dtype, the slowest and the fastest product."""
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in table):
        rows = sorted((row for row in table if row.dtype == dtype), key=lambda r: r.flops_per_s)
        ends = (f"{r.flops_per_s / 1e9:.1f} ({r.rows}x{r.inner}x{r.columns})" for r in rows[::-1])
        shown = list(ends)
        lines.append(f"matmul    {dtype}: {shown[-1]} to {shown[0]} GFLOP/s")
    return lines


def link_between(results: Sequence[Mapping[str, Any]], a: int, b: int) -> Link:
    """Return the link between two ranks: the mean of what its two ends found."""
    ends = [
        entry
        for rank, peer in ((a, b), (b, a))
        for entry in results[rank]["links"]
        if entry["peer"] == peer
    ]
    return Link(
        statistics.mean(end["latency_s"] for end in ends),
        statistics.mean(end["bytes_per_s"] for end in ends),
    )


def overheads_of(results: Sequence[Mapping[str, Any]]) -> Overheads:
    """Return the middle of what some processes found, to three digits."""
    found = [result["overheads"] for result in results]

    def middle(key: str) -> float:
        return three_digits(statistics.median(float(entry[key]) for entry in found))

    return Overheads(
        middle("message_s"),
        middle("message_bytes_per_s"),
        middle("instruction_s"),
        middle("step_s"),
    )


def _gpu(entry: Mapping[str, Any]) -> Gpu:
    return Gpu(
        str(entry["name"]),
        int(entry["memory_bytes"]),
        rates_of(entry),
        _middle_table([entry]),
    )


def rates_of(result: Mapping[str, Any]) -> Rates:
    """Return the rates that one process found."""
    return _middle_rates([result])


def _gpu_link(result: Mapping[str, Any]) -> Link | None:
    if "gpu_latency_s" not in result:
        return None
    return Link(float(result["gpu_latency_s"]), float(result["gpu_bytes_per_s"]))


def link_text(link: Link) -> str:
    """Write a link as people read it."""
    return f"{link.latency_s * 1e6:.0f} us, {link.bytes_per_s / 1e9:.2f} GB/s"


def overheads_text(own: Overheads) -> str:
    """Write overheads as people read them."""
    rate = own.message_bytes_per_s
    handled = f" and {rate / 1e9:.2f} GB/s" if rate else ""
    return (
        f"{own.message_s * 1e6:.0f} us a message{handled}, "
        f"{own.instruction_s * 1e6:.0f} us an instruction, {own.step_s * 1e6:.0f} us a step"
    )


def three_digits(value: float) -> float:
    """Round to what a measurement is good for."""
    return float(f"{value:.3g}")
