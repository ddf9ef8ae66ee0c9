"""Measurements of a device (matrix products, copies, tiny ops) and of a link.

This module times torch; it knows no processes and no files. Everything here runs inside a worker.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

# rows x inner x columns. Products of a model of some hundred to a thousand features: projection,
# the two halves of an MLP, the gradient of a weight, and a larger one.
CPU_SHAPES = (
    (128, 512, 512),
    (128, 512, 2048),
    (128, 2048, 512),
    (2048, 128, 512),
    (512, 1024, 1024),
)
GPU_SHAPES = ((2048, 1024, 4096), (2048, 4096, 1024), (4096, 2048, 1024), (2048, 4096, 4096))
# For the table only: a few rows, where reading the weights counts, and a small square.
CPU_TABLE = (*CPU_SHAPES, (8, 512, 512), (64, 64, 64))
GPU_TABLE = (*GPU_SHAPES, (64, 1024, 1024), (512, 512, 512))
CPU_DTYPES = (torch.float32, torch.bfloat16)
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {"cpu": CPU_SHAPES, "cuda": GPU_SHAPES}
TABLES = {"cpu": CPU_TABLE, "cuda": GPU_TABLE}
DTYPES = {"cpu": CPU_DTYPES, "cuda": GPU_DTYPES}
# Beyond most caches (50 MiB on an H100): weights come from memory, as they do when a model's layers
# take turns.
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
_WEIGHTS_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
_MOST_WEIGHTS = {"cpu": 64, "cuda": 512}
_FREE_SHARE = 4  # of a GPU's free memory a quarter is taken at most
_MESSAGE_BYTES = {"cpu": (2**18, 2**20, 2**22), "cuda": (2**22, 2**24, 2**26)}
_SAMPLES = 5
_WARM_UP = 3  # the first few messages of a size open buffers, the first calls load libraries
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 500


def per_call_s(
    run: Callable[[int], object], window_s: float, sync: Callable[[], object] = lambda: None
) -> float:
    """Time `run(0)`, `run(1)`, ... for about `window_s` seconds; return seconds per call.

    It is the median of a few stretches, each the mean over many calls. A mean includes the time of
    other processes, which a median of single calls does not; the median leaves out a stretch with a
    pause. A few calls run before, one by one: where a kernel had yet to be loaded, one alone would
    seem enough for a stretch.
    """
    for _ in range(_WARM_UP):
        _stretch_s(run, 1, sync)
    calls = 1
    while _stretch_s(run, calls, sync) < window_s / 8:
        calls *= 2
    return statistics.median(_stretch_s(run, calls, sync) for _ in range(_SAMPLES)) / calls


def _stretch_s(run: Callable[[int], object], calls: int, sync: Callable[[], object]) -> float:
    start = time.perf_counter()
    for i in range(calls):
        run(i)
    sync()
    return time.perf_counter() - start


def matmul_flops_per_s(
    shape: tuple[int, int, int],
    window_s: float,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Measure one shape of product, the right factor taken in turn from many."""
    rows, inner, columns = shape
    there = _at_most(_WEIGHTS_BYTES[device.type], device) // (dtype.itemsize * inner * columns)
    count = min(_MOST_WEIGHTS[device.type], max(2, there))
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weights = [torch.randn(columns, inner, device=device, dtype=dtype) for _ in range(count)]
    taken_s = per_call_s(
        lambda i: torch.mm(x, weights[i % count].t()), window_s, partial(synchronise, device)
    )
    return 2.0 * rows * inner * columns / taken_s


def copy_bytes_per_s(window_s: float, device: torch.device) -> float:
    """Measure a large copy; bytes read and bytes written both count, as they do for an op."""
    nbytes = _at_most(2 * _COPY_BYTES[device.type], device) // 2
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source).fill_(0.0)  # touched, so that no page is new
    taken_s = per_call_s(lambda _: target.copy_(source), window_s, partial(synchronise, device))
    return 2.0 * source.nbytes / taken_s


def _at_most(nbytes: int, device: torch.device) -> int:
    """Return so many bytes, or the share that a probe may take of what is free on a GPU."""
    if device.type != "cuda":
        return nbytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return min(nbytes, free_bytes // _FREE_SHARE)


def launch_s(window_s: float, device: torch.device) -> float:
    """Measure what an op costs that has nothing to do, recorded for backward as in training."""
    x = torch.ones(8, device=device, requires_grad=True)
    return per_call_s(lambda _: x + 1.0, window_s, partial(synchronise, device))


def processor_share(window_s: float) -> float:
    """Measure how much of a processor a thread is given that never waits: 1.0 is all of one.

    A quota (a container's, an emulated device's) or others on its core take the rest.
    """
    start_s, own_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start_s < window_s:
        pass
    taken_s = time.perf_counter() - start_s
    return min(1.0, (time.thread_time() - own_s) / taken_s)


def dtypes(kind: str, device: torch.device) -> Sequence[torch.dtype]:
    """Return what a table has; a GPU before compute capability 8 only emulates bfloat16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return [dtype for dtype in DTYPES[kind] if dtype != torch.bfloat16]
    return DTYPES[kind]


def matmul_table(
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[torch.dtype],
    window_s: float,
    device: torch.device,
    get_on: Callable[[], object] = lambda: None,
) -> list[dict[str, object]]:
    """Measure every shape in every dtype; rows as `MatmulRate` has them.

    `get_on` is called after each: on a busy host the whole table takes minutes.
    """
    rows: list[dict[str, object]] = []
    for dtype, shape in itertools.product(dtypes, shapes):
        flops_per_s = matmul_flops_per_s(shape, window_s, device, dtype)
        sizes = dict(zip(("rows", "inner", "columns"), shape, strict=True))
        named = {"dtype": str(dtype).removeprefix("torch."), **sizes}
        rows.append({**named, "flops_per_s": flops_per_s})
        get_on()
    return rows


def ping_pong(peer: int, leads: bool, window_s: float, wire: torch.device) -> tuple[float, float]:
    """Send messages to and fro between this rank and `peer`; both call this, and one leads.

    Larger messages are left out where they would take much longer than `window_s`.

    Args:
        peer: the other rank.
        leads: whether this rank sends first.
        window_s: seconds that each size takes, about.
        wire: where the backend takes messages from: for nccl the GPU, for gloo host memory.

    Returns:
        latency_s of an empty-handed message, and bytes_per_s of what larger ones take beyond that.
    """
    latency_s = _one_way_s(peer, leads, 4, window_s, wire)
    rates: list[float] = []
    for nbytes in _MESSAGE_BYTES[wire.type]:
        round_s = 2 * (latency_s + nbytes / rates[-1]) if rates else 0.0
        too_long = (_WARM_UP + _FEWEST_ROUNDS) * round_s > 4 * window_s
        if agreed(peer, leads, int(not too_long), wire) == 0:
            break
        taken_s = _one_way_s(peer, leads, nbytes, window_s / 2, wire)
        rates.append(beyond_latency_bytes_per_s(nbytes, taken_s, latency_s))
    return latency_s, statistics.median(rates)


def beyond_latency_bytes_per_s(nbytes: int, taken_s: float, latency_s: float) -> float:
    """Return the rate of a message once its latency is taken off.

    On a busy machine the measured latency may be longer than the message. At most half of a
    message's time counts as latency.
    """
    return nbytes / max(taken_s - latency_s, taken_s / 2)


def _one_way_s(peer: int, leads: bool, nbytes: int, window_s: float, wire: torch.device) -> float:
    message = torch.zeros(nbytes // 4, device=wire)
    # The first message of two ranks connects them, which over nccl takes long.
    warm_s = [_round_s(peer, leads, message) for _ in range(_WARM_UP)]
    fitting = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, round(window_s / warm_s[-1])))
    rounds = agreed(peer, leads, fitting, wire)
    _round_s(peer, leads, message)  # the ends have not begun it together
    taken_s = [_round_s(peer, leads, message) / 2 for _ in range(rounds)]
    return statistics.quantiles(taken_s, n=4)[0]  # disturbance only adds: the link's own is low


def _round_s(peer: int, leads: bool, message: torch.Tensor) -> float:
    start = time.perf_counter()
    if leads:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, peer)
        dist.send(message, peer)
    synchronise(message.device)  # over nccl nothing has left or come yet, only been asked for
    return time.perf_counter() - start


def agreed(peer: int, leads: bool, number: int, wire: torch.device) -> int:
    """Return the leader's number at both ends."""
    told = torch.tensor([number], device=wire)
    if leads:
        dist.send(told, peer)
    else:
        dist.recv(told, peer)
    return int(told)


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what this thread asked of it; a CPU has.

    Only the current stream counts: that of nccl may hold a send whose receiver waits for us, and
    `torch.cuda.synchronize` would wait for it.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
