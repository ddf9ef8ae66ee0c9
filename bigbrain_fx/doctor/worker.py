"""One process of the probe: meet the others, measure in step with them, write what was seen.

Run as `python -m bigbrain_fx.doctor.worker`; the parent is `fleet`. It prints nothing but faults.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bigbrain_fx.doctor import measure, overheads
from bigbrain_fx.doctor.limits import usable_memory_bytes
from bigbrain_fx.runtime.network import NetworkTransport
from bigbrain_fx.runtime.rendezvous import join

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = dict[str, object]

_ROUNDS = 3  # of which the middle counts


def main() -> None:
    """Join the group, measure, write the result."""
    options = _options()
    # Whatever hangs, and whoever started us is gone: this process ends.
    faulthandler.dump_traceback_later(options.deadline_s, exit=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    kinds = ["cpu"] * options.world  # over gloo
    store = join("doctor", kinds, options.rank, options.deadline_s)
    result = {"memory_bytes": usable_memory_bytes(), **_measure_cpu(options)}
    links = result["links"] = _measure_links(options)
    result["overheads"] = _measure_overheads(options, store, links)
    if options.gpus and options.rank == 0 and torch.cuda.is_available():
        result |= _measure_gpus(options.window_s)
    options.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "busy", "linked", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("window-s", "deadline-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--shared-cores", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _measure_cpu(options: argparse.Namespace) -> Result:
    """Measure with all busy ranks at once: they share caches, memory and cores, as devices will."""
    cpu = torch.device("cpu")
    busy = options.rank < options.busy
    rounds = [_round(busy, options.window_s / 2, cpu) for _ in range(_ROUNDS)]
    result: Result = {}
    if busy:
        result |= {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    dist.barrier()
    if busy and options.table:
        dtypes, shapes = measure.CPU_DTYPES, measure.CPU_TABLE
        result["matmul"] = measure.matmul_table(shapes, dtypes, options.window_s / 2, cpu)
    dist.barrier()
    return result


def _round(busy: bool, window_s: float, cpu: torch.device) -> dict[str, float]:
    """Measure every rate once; the rounds are seconds apart, so that one bad moment is outvoted."""
    found: dict[str, float] = {}
    rates = []
    for shape in measure.CPU_SHAPES:
        dist.barrier()
        if busy:
            rates.append(measure.matmul_flops_per_s(shape, window_s, cpu))
    dist.barrier()
    if busy:
        found["flops_per_s"] = statistics.median(rates)
        found["memory_bytes_per_s"] = measure.copy_bytes_per_s(2 * window_s, cpu)
    dist.barrier()
    if busy:
        found["launch_s"] = measure.launch_s(window_s, cpu)
    return found


def _measure_links(options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure every pair of the linked ranks in turn, while the others are still."""
    links: list[dict[str, float]] = []
    for pair in itertools.combinations(range(options.linked), 2):
        dist.barrier()
        if options.rank not in pair:
            continue
        leads = options.rank == pair[0]
        peer = pair[1] if leads else pair[0]
        latency_s, bytes_per_s = measure.ping_pong(peer, leads, options.window_s)
        links.append({"peer": peer, "latency_s": latency_s, "bytes_per_s": bytes_per_s})
    dist.barrier()
    return links


def _measure_overheads(
    options: argparse.Namespace, store: Store, links: list[dict[str, float]]
) -> Result:
    """Measure what messages cost either end, rank 0 with each in turn, and the runtime itself."""
    instruction_s, step_s = overheads.instruction_costs()
    result: Result = {"instruction_s": instruction_s, "step_s": step_s}
    ranks = {f"r{rank}": rank for rank in range(options.world)}
    cpu, most = torch.device("cpu"), max(3, round(20 * options.window_s))
    for peer in range(1, options.linked):
        dist.barrier()
        if options.rank not in (0, peer):
            continue
        leads = options.rank == 0
        other = peer if leads else 0
        (link,) = (entry for entry in links if entry["peer"] == other)
        fitting = round(2 * options.window_s / overheads.round_s(link))
        rounds = measure.agreed(other, leads, min(most, max(3, fitting)))
        # One transport for each pair: a channel's tag belongs to one peer.
        transport = NetworkTransport(ranks, cpu, options.deadline_s, store)
        message_s, bytes_per_s = overheads.message_costs(
            transport, ("r0", f"r{peer}"), leads, rounds, options.shared_cores
        )
        result |= {"message_s": message_s, "message_bytes_per_s": bytes_per_s}
    dist.barrier()
    return result


def _measure_gpus(window_s: float) -> Result:
    gpus = [_measure_gpu(i, window_s) for i in range(torch.cuda.device_count())]
    if len(gpus) < 2:
        return {"gpus": gpus}
    latency_s, bytes_per_s = measure.gpu_link(window_s)
    return {"gpus": gpus, "gpu_latency_s": latency_s, "gpu_bytes_per_s": bytes_per_s}


def _measure_gpu(index: int, window_s: float) -> Result:
    device = torch.device("cuda", index)
    free_bytes, _ = torch.cuda.mem_get_info(device)  # what the context itself takes is gone already
    rates = [
        measure.matmul_flops_per_s(shape, window_s / 2, device) for shape in measure.GPU_SHAPES
    ]
    return {
        "name": torch.cuda.get_device_name(device),
        "memory_bytes": free_bytes,
        "flops_per_s": statistics.median(rates),
        "memory_bytes_per_s": measure.copy_bytes_per_s(window_s, device),
        "launch_s": measure.launch_s(window_s / 2, device),
        "matmul": measure.matmul_table(measure.GPU_TABLE, measure.GPU_DTYPES, window_s / 2, device),
    }


if __name__ == "__main__":
    main()
