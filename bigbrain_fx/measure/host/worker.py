"""One process of the probe: meet the others, measure in step with them, write what was seen.

Run as `python -m bigbrain_fx.measure.host.worker`; the parent is `fleet`. It prints nothing but
faults; where `--out` is "-", a dot as it gets on, and what it found. What a CPU and a GPU do
differently: `_memory`, `_meet`, `measure.synchronise`, and what is on the wire.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bigbrain_fx.core import blas_bytes
from bigbrain_fx.measure.host import kernels, measure, overheads
from bigbrain_fx.measure.host.fleet import ALIVE, ON_STDOUT, RESULT
from bigbrain_fx.measure.host.limits import usable_memory_bytes
from bigbrain_fx.runtime import NetworkTransport, join, leave_together, own_device, transport_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = dict[str, object]

_ROUNDS = 3  # of which the middle counts
_MOST_SHAPES = max(map(len, measure.SHAPES.values()))
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Seat:
    """The device on which this process computes, and the one from which its backend sends."""

    kind: str
    device: torch.device
    wire: torch.device
    store: Store
    get_on: Callable[[], None]


def main() -> None:
    """Join the group, measure, write the result."""
    options = _options()
    _get_on(options)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    place = _join(options)
    rates = _measure_device(options, place)
    result = {**_memory(place.device), **rates}
    links = result["links"] = _measure_links(options, place)
    own = _measure_overheads(options, place, links)
    result["overheads"] = overheads.stretched(own, _share(rates))
    if options.gpus and options.rank == 0:
        result["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.out == Path(ON_STDOUT):
        print(RESULT + json.dumps(result), flush=True)
    else:
        options.out.write_text(json.dumps(result), encoding="utf-8")
    _meet(place)  # nobody leaves while another still needs it
    dist.destroy_process_group()
    leave_together(place.store, options.rank, len(options.kinds))


def _get_on(options: argparse.Namespace) -> None:
    """Tell who started us that we get on. If we do not, and they are gone, this process ends."""
    faulthandler.dump_traceback_later(options.deadline_s, exit=True)
    if options.out == Path(ON_STDOUT):
        print(".", flush=True)
    else:
        options.out.with_suffix(ALIVE).touch()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("rank", "busy", "linked", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("window-s", "deadline-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--kinds", type=lambda text: text.split(","), required=True)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--shared-cores", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _join(options: argparse.Namespace) -> _Seat:
    """Join the others as the processes of a bundle do, over nccl or gloo."""
    kind = options.kinds[options.rank]
    device = own_device(options.kinds, options.rank)
    store = join("doctor", options.kinds, options.rank, options.deadline_s)
    wire = device if dist.get_backend() == "nccl" else _CPU
    return _Seat(kind, device, wire, store, partial(_get_on, options))


def _meet(place: _Seat) -> None:
    """Wait for all; to nccl that is a message between GPUs, so it must know which is ours."""
    dist.barrier(device_ids=[place.wire.index] if place.wire.type == "cuda" else None)
    place.get_on()


def _memory(device: torch.device) -> Result:
    if device.type != "cuda":
        return {"memory_bytes": usable_memory_bytes()}
    free_bytes, _ = torch.cuda.mem_get_info(device)  # what the context itself takes is gone already
    return {
        "name": torch.cuda.get_device_name(device),
        "memory_bytes": free_bytes,
        "blas_bytes": _blas_bytes(device),
    }


def _blas_bytes(device: torch.device) -> int:
    """Ask torch, or know what it does: 2.9 does not say it."""
    ask = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return int(ask()) if ask else blas_bytes(torch.cuda.get_device_capability(device))


def _measure_device(options: argparse.Namespace, place: _Seat) -> Result:
    """Measure with all busy ranks at once: they share caches, memory and cores, as devices will."""
    busy = options.rank < options.busy
    rounds = [_round(busy, options.window_s / 2, place) for _ in range(_ROUNDS)]
    result: Result = {}
    if busy:
        result |= {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    _meet(place)
    if busy and options.table:
        dtypes = measure.dtypes(place.kind, place.device)
        shapes = measure.TABLES[place.kind]
        result["matmul"] = measure.matmul_table(
            shapes, dtypes, options.window_s / 2, place.device, place.get_on
        )
    if busy and options.table and place.device.type == "cuda":
        result["kernels"] = kernels.kernels_s(options.window_s / 2, place.device, place.get_on)
    _meet(place)
    return result


def _share(rates: Result) -> float:
    """Return which share of a processor the device has; of one that did not compute, all."""
    share = rates.get("share", 1.0)
    assert isinstance(share, float)
    return share


def _round(busy: bool, window_s: float, place: _Seat) -> dict[str, float]:
    """Measure every rate once; the rounds are seconds apart, so that one bad moment is outvoted."""
    found: dict[str, float] = {}
    rates = []
    for shape in _in_step(measure.SHAPES[place.kind]):
        _meet(place)
        if busy and shape is not None:
            rates.append(measure.matmul_flops_per_s(shape, window_s, place.device))
    _meet(place)
    if busy:
        found["flops_per_s"] = statistics.median(rates)
        found["memory_bytes_per_s"] = measure.copy_bytes_per_s(2 * window_s, place.device)
    _meet(place)
    if busy:
        found["launch_s"] = measure.launch_s(window_s, place.device)
    _meet(place)
    if busy:
        found["share"] = measure.processor_share(window_s)
    return found


def _in_step(shapes: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int] | None, ...]:
    """Make shapes as many as every other kind of device has: all meet equally often."""
    return (*shapes, *(None,) * (_MOST_SHAPES - len(shapes)))


def _measure_links(options: argparse.Namespace, place: _Seat) -> list[dict[str, float]]:
    """Measure every pair of the linked ranks in turn, while the others are still."""
    links: list[dict[str, float]] = []
    for pair in itertools.combinations(range(options.linked), 2):
        _meet(place)
        if options.rank not in pair:
            continue
        leads = options.rank == pair[0]
        peer = pair[1] if leads else pair[0]
        latency_s, bytes_per_s = measure.ping_pong(peer, leads, options.window_s, place.wire)
        links.append({"peer": peer, "latency_s": latency_s, "bytes_per_s": bytes_per_s})
    _meet(place)
    return links


def _measure_overheads(
    options: argparse.Namespace, place: _Seat, links: list[dict[str, float]]
) -> dict[str, float]:
    """Measure what messages cost either end, rank 0 with each in turn, and the runtime itself.

    In seconds of a processor: between messages a device waits, which is not its own time.

    Who has no peer leaves messages out.
    """
    instruction_s, step_s = overheads.instruction_costs(place.device)
    result = {"instruction_s": instruction_s, "step_s": step_s}
    for peer in range(1, options.linked):
        _meet(place)
        names = "r0", f"r{peer}"
        transport = _transport(options, place, names)
        if options.rank in (0, peer):
            other = peer if options.rank == 0 else 0
            (link,) = (entry for entry in links if entry["peer"] == other)
            result |= _measure_messages(options, place, names, transport, link)
    _meet(place)
    return result


def _transport(
    options: argparse.Namespace, place: _Seat, names: tuple[str, str]
) -> NetworkTransport:
    """Make a transport for a pair, as a channel's tag belongs to one peer; all ranks make it."""
    ranks = {f"r{rank}": rank for rank in range(len(options.kinds))}
    used = itertools.chain.from_iterable(overheads.channels(names))
    return transport_of(ranks, place.device, options.deadline_s, place.store, used)


def _measure_messages(
    options: argparse.Namespace,
    place: _Seat,
    names: tuple[str, str],
    transport: NetworkTransport,
    link: dict[str, float],
) -> dict[str, float]:
    leads, peer = options.rank == 0, int(link["peer"])
    most = max(3, round(20 * options.window_s))
    fitting = round(2 * options.window_s / overheads.round_s(link))
    rounds = measure.agreed(peer, leads, min(most, max(3, fitting)), place.wire)
    message_s, bytes_per_s = overheads.message_costs(
        transport, names, leads, rounds, options.shared_cores, place.device
    )
    return {"message_s": message_s, "message_bytes_per_s": bytes_per_s}


if __name__ == "__main__":
    main()
