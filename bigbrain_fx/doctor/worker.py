"""One process of the probe: meet the others, measure in step with them, write what was seen.

Run as `python -m bigbrain_fx.doctor.worker`; the parent is `fleet`. It prints nothing but faults.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bigbrain_fx.doctor import measure

Result = dict[str, object]


def main() -> None:
    """Join the group, measure, write the result."""
    options = _options()
    # Whatever hangs, and whoever started us is gone: this process ends.
    faulthandler.dump_traceback_later(options.deadline_s, exit=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    _join(options)
    result = _measure_cpu(options)
    if options.gpus and options.rank == 0 and torch.cuda.is_available():
        result |= _measure_gpus(options.window_s)
    options.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "busy", "threads", "port", "listen-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("window-s", "deadline-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _join(options: argparse.Namespace) -> None:
    timeout = timedelta(seconds=options.deadline_s)
    is_master = options.rank == 0
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it, but not for mypy
        "127.0.0.1",
        options.port,
        options.world,
        is_master,
        timeout=timeout,
        master_listen_fd=options.listen_fd if is_master else None,
    )
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=options.world, timeout=timeout
    )


def _measure_cpu(options: argparse.Namespace) -> Result:
    """Measure with all busy ranks at once: they share caches, memory and cores, as devices will."""
    cpu = torch.device("cpu")
    window_s = options.window_s
    busy = options.rank < options.busy
    result: Result = {}
    rates = []
    for shape in measure.CPU_SHAPES:
        dist.barrier()
        if busy:
            rates.append(measure.matmul_flops_per_s(shape, window_s, cpu))
    dist.barrier()
    if busy:
        result["flops_per_s"] = statistics.median(rates)
        result["memory_bytes_per_s"] = measure.copy_bytes_per_s(2 * window_s, cpu)
    dist.barrier()
    if busy:
        result["launch_s"] = measure.launch_s(window_s, cpu)
    dist.barrier()
    if options.rank < 2:
        latency_s, bytes_per_s = measure.ping_pong(options.rank, rounds=round(80 * window_s))
        result |= {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
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
    }


if __name__ == "__main__":
    main()
