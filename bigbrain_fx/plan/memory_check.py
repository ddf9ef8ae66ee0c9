"""Fit of a plan: memory of a process beside its program's tensors, and the arithmetic of it.

    tensors = weights + gradients + optimizer + activations + messages + data      (peak_bytes)
    needs   = tensors * SHARE + context                            compared with a device's memory

The module knows forecasts and devices; it knows nothing of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, Device, DeviceForecast, Forecast, Graph, Stages
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan.schedule import library_bytes, rounded


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a kind of device beside live tensors.

    Attributes:
        share: resident memory over live tensor bytes: blocks that an allocator cannot reuse.
        context_bytes: taken before a tensor is made.
    """

    share: float
    context_bytes: int


PROCESS: Mapping[str, ProcessMemory] = {
    "cpu": ProcessMemory(share=1.2, context_bytes=40 << 20),
    "cuda": ProcessMemory(share=1.1, context_bytes=600 << 20),
}
"""CPU: covers VmHWM less a warmed baseline in `python -m tools.conformance memory` and, on emulated
devices, in `tools.studies.fidelity` (gloo's buffers, blocks that malloc keeps). CUDA: the context,
and segments that the allocator cannot reuse, a guess, not measured; cuBLAS's workspace is among the
tensors.
What `doctor` writes of a GPU is free once a context exists, so the context is taken off twice
there, which only leaves more to spare.
"""


def process_of(device: Device) -> ProcessMemory:
    """Return what a device's process takes: as its cluster file says, else as usual."""
    usual, said = PROCESS[device.kind], device.process_bytes
    return usual if said is None else replace(usual, context_bytes=said)


COMPILER_BYTES = 200 << 20
"""What torch's compiler takes in a process whose stages it compiles, and its code afterwards.

Of a device with a million parameters, `run` of a compiled bundle and of a plain one: 97 MiB more
resident where nothing had been compiled before, 64 MiB where torch's cache on the disk had it.
"""


def beside_compiler(cluster: Cluster, *, compiled: bool) -> Cluster:
    """Return the cluster with the memory that is left beside torch's compiler."""
    if not compiled:
        return cluster
    left = (replace(d, memory_bytes=d.memory_bytes - COMPILER_BYTES) for d in cluster.devices)
    return replace(cluster, devices=tuple(left))


def of_compiler(*, compiled: bool) -> tuple[str, ...]:
    """Return what `beside_compiler` takes off, as a line of a refusal."""
    return (f"--compile takes {mib(COMPILER_BYTES)} of each besides",) if compiled else ()


def with_data(
    forecast: Forecast, graph: Graph, stages: Stages, micro_batches: int, cluster: Cluster
) -> Forecast:
    """Return a forecast that counts the batch, too: every device splits all of it.

    The forecast also counts the process's memory beside tensors, where the cluster file states it.
    Memory of the user's `batches` itself, such as a data set, is unknown and not counted.
    """

    def counted(entry: DeviceForecast) -> DeviceForecast:
        device = cluster.device[entry.device]
        data = data_bytes(graph, stages, micro_batches, device.kind)
        more = data + (device.process_bytes or 0)
        held = tuple((when_s, nbytes + more) for when_s, nbytes in entry.held)
        return replace(entry, data_bytes=data, peak_bytes=entry.peak_bytes + more, held=held)

    return replace(forecast, devices=tuple(map(counted, forecast.devices)))


def data_bytes(graph: Graph, stages: Stages | None, micro_batches: int, kind: str) -> int:
    """Return the bytes of a batch on a kind of device: each micro-batch is a tensor of its own.

    Of all its entries where no stages are given, else of those that they read.
    """
    used = None if stages is None else {name for s in stages.stages for name in s.inputs}
    entries = [entry for entry in graph.inputs if used is None or entry.name in used]
    counts = [micro_batches if entry.batched else 1 for entry in entries]
    each = [rounded(entry.spec.nbytes, kind) for entry in entries]
    return sum(count * nbytes for count, nbytes in zip(counts, each, strict=True))


def needed_bytes(entry: DeviceForecast, device: Device) -> int:
    """Return the memory that a device's process needs for what it holds."""
    process = process_of(device)
    return int(held_bytes(entry, device) * process.share) + process.context_bytes


def held_bytes(entry: DeviceForecast, device: Device) -> int:
    """Return the bytes of tensors at the peak, less what the cluster file says of the process."""
    return entry.peak_bytes - (device.process_bytes or 0)


def for_tensors(cluster: Cluster, graph: Graph, micro_batches: int) -> Cluster:
    """Return the cluster with the memory that is left for a plan's tensors.

    The batch is taken off, and what cuBLAS takes.
    """

    def smaller(device: Device) -> Device:
        process = process_of(device)
        data = data_bytes(graph, None, micro_batches, device.kind)
        tensors = int((device.memory_bytes - process.context_bytes) / process.share)
        left = tensors - data - _libraries_bytes(device, graph)
        return replace(device, memory_bytes=max(1, left))

    return replace(cluster, devices=tuple(map(smaller, cluster.devices)))


def _libraries_bytes(device: Device, graph: Graph) -> int:
    return library_bytes(device, graph.ops, graph.loss is not None)


def require_fits(forecast: Forecast, cluster: Cluster, *, compiled: bool = False) -> None:
    """Raise where a device lacks memory; of `compiled` stages beside torch's compiler.

    Raises:
        NoPlanError: with what every device needs, of what, and has.
    """
    left = beside_compiler(cluster, compiled=compiled)
    lacking = [e for e in forecast.devices if _lacks(e, left.device[e.device])]
    if lacking:
        names = ", ".join(entry.device for entry in lacking)
        raise NoPlanError(
            f"the plan does not fit: {names} would run out of memory",
            code="BX1244",
            notes=(
                *(arithmetic(e, cluster.device[e.device]) for e in forecast.devices),
                *of_compiler(compiled=compiled),
            ),
            help="use more micro-batches, more devices, or devices with more memory",
        )


def tensor_bytes(device: Device) -> float:
    """Return the most that tensors of a device's process may take, data among them."""
    process = process_of(device)
    return (device.memory_bytes - process.context_bytes) / process.share


def least_memory(forecast: Forecast, cluster: Cluster, graph: Graph, micro_batches: int) -> int:
    """Return a memory that is enough for every device of a plan, a planner's reserve included.

    A planner reserves for the worst order of events; a fifth on top covers what that adds.
    """
    devices = ((entry, cluster.device[entry.device]) for entry in forecast.devices)
    needs = (
        needed_bytes(entry, device) + data_bytes(graph, None, micro_batches, device.kind)
        for entry, device in devices
    )
    return int(1.2 * max(needs))


def _lacks(entry: DeviceForecast, device: Device) -> bool:
    return needed_bytes(entry, device) > device.memory_bytes


def arithmetic(entry: DeviceForecast, device: Device) -> str:
    """Return what a device needs, what it has, and what the need is made of."""
    process, held = process_of(device), held_bytes(entry, device)
    parts = {
        "weights": entry.weights_bytes,
        "gradients": entry.gradients_bytes,
        "optimizer": entry.optimizer_bytes,
        "activations": entry.activations_bytes,
        "messages": entry.messages_bytes,
        "data": entry.data_bytes,
        "allocator": int(held * process.share) - held,
        "context": process.context_bytes,
    }
    has = f"needs {mib(needed_bytes(entry, device))} and has {mib(device.memory_bytes)}"
    made_of = ", ".join(f"{name} {mib(count)}" for name, count in parts.items() if count)
    return f"{entry.device} {has}: {made_of}"


def mib(count: int) -> str:
    """Return bytes as text."""
    return f"{count / 2**20:.1f} MiB"
