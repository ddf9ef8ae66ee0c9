"""This host -> what a cluster.json for forecasts needs: which processes measure what.

This room decides what to start and puts the figures together; it prints nothing.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence

from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host.figures import (
    Kind,
    Result,
    link_between,
    overheads_of,
    rates_of,
    table_of,
)
from bigbrain_fx.measure.host.fleet import WORKER, Fleet, patience_s, run
from bigbrain_fx.measure.host.host import Gpu, HostProbe
from bigbrain_fx.measure.host.limits import usable_cores, usable_memory_bytes
from bigbrain_fx.measure.host.processor import processor_name

_QUICK_WINDOW_S = 0.25
_THOROUGH_WINDOW_S = 2.0
_QUICK_DEADLINE_S = 60.0
_THOROUGH_DEADLINE_S = 180.0


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
    over gloo on 127.0.0.1. GPUs, where there are any, are then probed by a process each, all of
    them at once, and the link of every pair is a ping-pong over what bundles of GPUs use: nccl.

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
        gpus=tuple(_gpu(result, results[0]) for result in found),
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
    return Fleet(
        names=("d0",),
        kinds=("cpu",),
        threads=(1,),
        busy=0,
        linked=0,
        window_s=0.01,
        deadline_s=_QUICK_DEADLINE_S,
        gpus=True,
    )


def _cpu_fleet(threads: int, devices: int, cores: int, quick: bool, gpus: bool) -> Fleet:
    """Return the processes that measure: one for each device, and two at least for the link."""
    world = max(2, devices)
    kinds: list[Kind] = ["cpu"] * world
    return Fleet(
        names=tuple(f"d{i}" for i in range(world)),
        kinds=tuple(kinds),
        threads=(threads,) * world,
        busy=devices,
        linked=2,
        window_s=_QUICK_WINDOW_S if quick else _THOROUGH_WINDOW_S,
        deadline_s=_QUICK_DEADLINE_S if quick else _THOROUGH_DEADLINE_S,
        gpus=gpus,
        table=True,
        shared_cores=cores < 2 * threads * devices,
    )


def _gpu_fleet(threads: int, count: int, quick: bool) -> Fleet:
    """Return one process for each GPU, whether the cluster shall have it or not."""
    kinds: list[Kind] = ["cuda"] * count
    window_s = _QUICK_WINDOW_S if quick else _THOROUGH_WINDOW_S
    return Fleet(
        names=tuple(f"d{i}" for i in range(count)),
        kinds=tuple(kinds),
        threads=(threads,) * count,
        busy=count,
        linked=count,
        window_s=window_s,
        deadline_s=patience_s(kinds, window_s),
        table=True,
    )


def _gpu(own: Result, of_cpu: Result) -> Gpu:
    """Return a GPU; one that is alone had no peer to find out what a message costs."""
    overheads = {**of_cpu["overheads"], **own["overheads"]}
    return Gpu(
        str(own["name"]),
        int(own["memory_bytes"]),
        rates_of([own]),
        table_of([own]),
        overheads_of([{"overheads": overheads}]),
        int(own["blas_bytes"]),
        {str(name): float(took_s) for name, took_s in own.get("kernels", {}).items()},
    )
