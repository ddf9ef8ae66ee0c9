"""This host -> what a cluster.json for forecasts needs: which processes measure what.

This module decides what to start and puts the figures together; it prints nothing.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host.clusters import DeviceProbe
from bigbrain_fx.measure.host.figures import (
    Kind,
    Result,
    link_between,
    overheads_of,
    rates_of,
    table_of,
)
from bigbrain_fx.measure.host.fleet import WORKER, Fleet, patience_s, run
from bigbrain_fx.measure.host.host import HostProbe
from bigbrain_fx.measure.host.limits import usable_cores, usable_memory_bytes
from bigbrain_fx.measure.host.processor import processor_name

_WINDOW_S = {True: 0.25, False: 2.0}  # quick, or thorough
_DEADLINE_S = {True: 60.0, False: 180.0}


def probe(
    threads: int = 1,
    devices: int = 2,
    quick: bool = True,
    kind: Kind | None = None,
    *,
    worker: Sequence[str] = WORKER,
) -> HostProbe:
    """Measure this host as `devices` devices would use it: all at once.

    Processes of one host share its memory bandwidth, caches and cores, so the rates are those of
    `devices` processes that compute at the same time. The link is a ping-pong of two processes
    over gloo on 127.0.0.1. A process each then probes GPUs, where there are any, all of them at
    once. The link of every pair is a ping-pong over nccl, as bundles of GPUs use it.

    Args:
        threads: CPU threads of each device.
        devices: how many devices the cluster shall have.
        quick: some ten seconds; otherwise about a minute, for steadier figures.
        kind: what the devices are; None takes GPUs where there are `devices` of them, else CPU
            processes. "cpu" leaves GPUs alone.
        worker: the program of each process.

    Raises:
        InputError: numbers that this host cannot do.
        ProbeError: a process failed or hung.
    """
    cores = usable_cores()
    _check(threads, devices, cores)
    memory_bytes, load = usable_memory_bytes(), os.getloadavg()[0]  # before our own processes
    start = time.monotonic()
    if kind == "cuda":  # before anything is measured
        _require_gpus(devices, int(run(_asking_fleet(), worker)[0].get("gpus", 0)))
    results = run(_cpu_fleet(threads, devices, cores, quick, gpus=kind != "cpu"), worker)
    count = int(results[0].get("gpus", 0))
    found = run(_gpu_fleet(threads, count, quick), worker) if count else []
    return HostProbe(
        kind=kind or ("cuda" if count >= devices else "cpu"),
        devices=devices,
        threads=threads,
        cores=cores,
        memory_bytes=memory_bytes,
        cpu=rates_of(results[:devices]),
        link=link_between(results, 0, 1),
        gpus=tuple(_gpu(result, results[0], threads) for result in found),
        gpu_links=tuple(
            (a, b, link_between(found, a, b)) for a, b in itertools.combinations(range(count), 2)
        ),
        took_s=time.monotonic() - start,
        load=load,
        matmul=table_of(results[:devices]),
        overheads=overheads_of(results[:2]),
        processor=processor_name(),
    )


def _check(threads: int, devices: int, cores: int) -> None:
    if not 1 <= threads <= cores:
        raise InputError(
            f"expected 1 to {cores} threads, as this host has {cores} cores, found {threads}",
            code="BX1510",
            at="--threads",
            help="--threads 1",
        )
    most = 4 * cores
    if not 1 <= devices <= most:
        raise InputError(
            f"expected 1 to {most} devices on {cores} cores, found {devices}",
            code="BX1511",
            at="--devices",
            help=f"probe with --devices {min(2, most)}; "
            "for a larger cluster copy the entries and change their hosts",
        )


def _require_gpus(devices: int, found: int) -> None:
    if found < devices:
        raise InputError(
            f"expected {devices} GPUs, found {found}",
            code="BX1512",
            at="--devices" if found else "--kind cuda",
            help=f"ask for --devices {found}" if found else "probe the CPU instead: --kind cpu",
        )


def _asking_fleet() -> Fleet:
    """Return one process that measures nothing: it tells how many GPUs torch sees."""
    return _fleet(["cpu"], threads=1, busy=0, linked=0, window_s=0.01, gpus=True)


def _cpu_fleet(threads: int, devices: int, cores: int, quick: bool, gpus: bool) -> Fleet:
    """Return the processes that measure: one for each device, and two at least for the link."""
    fleet = _fleet(
        ["cpu"] * max(2, devices), threads, devices, linked=2, window_s=_WINDOW_S[quick], gpus=gpus
    )
    deadline_s, shared_cores = _DEADLINE_S[quick], cores < 2 * threads * devices
    return replace(fleet, deadline_s=deadline_s, table=True, shared_cores=shared_cores)


def _gpu_fleet(threads: int, count: int, quick: bool) -> Fleet:
    """Return one process for each GPU, whether the cluster shall have it or not."""
    kinds: list[Kind] = ["cuda"] * count
    window_s = _WINDOW_S[quick]
    fleet = _fleet(kinds, threads, count, count, window_s)
    return replace(fleet, deadline_s=patience_s(fleet.kinds, window_s), table=True)


def _fleet(
    kinds: Sequence[Kind], threads: int, busy: int, linked: int, window_s: float, gpus: bool = False
) -> Fleet:
    names = tuple(f"d{number}" for number in range(len(kinds)))
    each = (threads,) * len(kinds)
    return Fleet(names, tuple(kinds), each, busy, linked, window_s, _DEADLINE_S[True], gpus=gpus)


def _gpu(own: Result, of_cpu: Result, threads: int) -> DeviceProbe:
    """Return a GPU; one that is alone had no peer to find out what a message costs."""
    overheads = {**of_cpu["overheads"], **own["overheads"]}
    return DeviceProbe(
        str(own["name"]),
        "localhost",
        threads,
        int(own["memory_bytes"]),
        rates_of([own]),
        overheads_of([{"overheads": overheads}]),
        "cuda",
        int(own["blas_bytes"]),
        matmul=table_of([own]),
        kernels={str(name): float(took_s) for name, took_s in own.get("kernels", {}).items()},
    )
