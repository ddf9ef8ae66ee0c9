"""Tensors in a device's offload target instead of its memory: requests, refusals, costs, sentences.

The module knows stages, clusters and costs; it knows nothing of schedules, and moves no bytes.

Source: Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.2, for the optimizer's state piece by
piece; here without its overlap with computing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Forecast,
    Graph,
    Offloaded,
    OpCost,
    Saves,
    Stages,
)
from bigbrain_fx.errors import InputError, NoPlanError

WORDS: tuple[Offloaded, ...] = ("activations", "state", "weights")
NO_STORE = '{"name": "disk", "device": "NAME", "folder": "/scratch", "capacity": "64GiB", "bandwidth": "1GB/s"}'  # noqa: E501  # as it is pasted
STORED_FROM_BYTES = 4096
"""What is smaller stays on the device whatever is offloaded: see `runtime.stores`."""
_ROOMY_BYTES = 1 << 60
_SAID: Mapping[Offloaded, str] = {
    "activations": "what forwards save",
    "state": "what the optimizer keeps",
    "weights": "weights and gradients of stages that do not run",
}


def read_offload(text: str | None) -> tuple[Offloaded, ...]:
    """Read "activations", "state", both with a comma between them, or nothing.

    Raises:
        InputError: it has another word; names the nearest.
    """
    words = [] if text in (None, "none") else [word.strip() for word in str(text).split(",")]
    for word in words:
        if word not in WORDS:
            near = difflib.get_close_matches(word, WORDS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"there is no {word!r} to offload",
                code="BX1245",
                at="--offload",
                help=f"{hint}write {_listed()}",
            )
    return tuple(word for word in WORDS if word in words)


def _listed() -> str:
    return f"{', '.join(WORDS)} (several with a comma between them) or none"


def as_planners_see(costs: Costs, wanted: tuple[Offloaded, ...]) -> Costs:
    """Return costs without offloaded tensors, except one parameter's share of them at once.

    Where weights are offloaded, most of a planner's memory terms are too, and planners need not
    count them.

    Transfers to and from the store are in the seconds of ops and of the optimizer.
    """
    if "weights" in wanted:
        costs = replace(costs, cluster=_roomy(costs.cluster))
    elif "activations" in wanted:
        ops = {d: _without_saved(found, costs.cluster, d) for d, found in costs.ops.items()}
        alone = None if costs.alone is None else as_planners_see(costs.alone, ("activations",))
        costs = replace(costs, ops=ops, alone=alone)
    if "state" not in wanted:
        return costs
    state, update = costs.optimizer_state_per_byte, costs.optimizer_s_per_byte
    moving = {d: s + both_ways_s(costs.cluster, d, state) for d, s in update.items()}
    return replace(
        costs,
        optimizer_s_per_byte=moving,
        optimizer_state_per_byte=0.0,
        optimizer_temporaries=costs.optimizer_temporaries + state,
        alone=None if costs.alone is None else as_planners_see(costs.alone, ("state",)),
    )


def _roomy(cluster: Cluster) -> Cluster:
    """Return a cluster whose memory is of no concern: of a layer at a time, the ledger tells."""
    devices = (replace(device, memory_bytes=_ROOMY_BYTES) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _without_saved(
    ops: Mapping[str, OpCost], cluster: Cluster, device: str
) -> Mapping[str, OpCost]:
    def one(cost: OpCost) -> OpCost:
        moving_s = cost.saved_bytes / cluster.store[device].bytes_per_s
        return replace(
            cost,
            saved_bytes=0,
            forward_s=cost.forward_s + moving_s,
            backward_s=cost.backward_s + moving_s,
            backward_input_s=cost.backward_input_s + moving_s,
        )

    return {name: one(cost) for name, cost in ops.items()}


def as_planners_read(graph: Graph, wanted: tuple[Offloaded, ...]) -> Graph:
    """Return a concrete graph whose ops keep nothing, where that lies in stores."""
    if "activations" not in wanted or "weights" in wanted:
        return graph
    ops = (op if op.saves is None else replace(op, saves=_gone(op.saves)) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _gone(saves: Saves) -> Saves:
    cuda_bytes = None if saves.cuda_own_bytes is None else 0
    return replace(saves, values=(), own_bytes=0, cuda_own_bytes=cuda_bytes, cuda_values=())


def both_ways_s(cluster: Cluster, device: str, nbytes: float) -> float:
    """Seconds to read so many bytes from a device's store and to write them back."""
    return 2 * nbytes / cluster.store[device].bytes_per_s


def require_capacity(forecast: Forecast, cluster: Cluster) -> None:
    """Refuse a plan whose stores are too small.

    Raises:
        NoPlanError: what every store would hold, and what it takes.
    """
    used = [entry for entry in forecast.devices if entry.stored_bytes]
    small = [e for e in used if e.stored_bytes > cluster.store[e.device].capacity_bytes]
    if not small:
        return
    names = ", ".join(f"{cluster.store[e.device].name} of {e.device}" for e in small)
    notes = [
        f"store {cluster.store[e.device].name} of {e.device} would hold {_size(e.stored_bytes)} "
        f"and takes {_size(cluster.store[e.device].capacity_bytes)}"
        for e in used
    ]
    raise NoPlanError(
        f"the plan does not fit: the store {names} is too small",
        code="BX1250",
        notes=tuple(notes),
        help='give it more "capacity" in the cluster file, use more devices, or leave --offload '
        "out",
    )


def offload_text(stages: Stages, forecast: Forecast, cluster: Cluster) -> str:
    """Say what lies where, and what moving it takes of a step; nothing, where nothing does."""
    if not stages.offload:
        return ""
    each = [
        f"{_size(e.stored_bytes)} of {e.device} in {cluster.store[e.device].name} "
        f"({e.moved_s:.4f} s to read and write a step)"
        for e in forecast.devices
        if e.stored_bytes
    ]
    said = dict(_SAID)
    if stages.recompute:
        said["activations"] = "what stages received"
    what = " and ".join(", ".join(said[word] for word in stages.offload).rsplit(", ", 1))
    lies = f"{what} lies in stores: {', '.join(each)}" if each else _nothing(stages)
    return "; ".join((f"offload: {lies}", *_kept_here(stages)))


def _nothing(stages: Stages) -> str:
    """Say why nothing lies in stores: all is smaller than what a store keeps, or there is none."""
    kept = {"state": "for a parameter", "activations": "of a tensor"}
    each = " or ".join(kept[word] for word in stages.offload if word in kept)
    if not each:
        return "nothing lies in stores"
    return (
        f"nothing lies in stores: what is kept {each} of less than {STORED_FROM_BYTES:,} bytes "
        "stays in memory, and there is nothing else; --offload changes nothing here"
    )


def _kept_here(stages: Stages) -> Iterator[str]:
    """Say which stages keep their activations in memory although others do not, and why."""
    if "activations" not in stages.offload:
        return
    for each in stages.saves:
        if not each.pays:
            yield (
                f"stage {each.stage} keeps its activations: moving them would take "
                f"{each.write_s + each.read_s:.4f} s a micro-batch, computing takes "
                f"{each.compute_s:.4f} s"
            )
    able = {each.stage for each in stages.saves}
    marked = (*stages.again, *stages.deferring)
    for number in sorted(set(marked) - able):
        yield f"stage {number} keeps its activations: its backward is split, or makes them again"


def _size(count: int) -> str:
    """Write bytes in MiB, or of small ones so that their difference is seen."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
