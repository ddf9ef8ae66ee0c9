"""Train a plain pipeline: join the other processes, load one device's weights, run the steps."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from .coded import CodedError, MisuseError
from .gloo import GlooTransport
from .pipeline_device import PipelineDevice
from .recipe import Training
from .stream import BatchStream, Key, Spec


@dataclass(frozen=True)
class Pipeline:
    """Facts of the bundle in `train.py`."""

    folder: Path
    plan: str
    devices: tuple[type[PipelineDevice], ...]
    kinds: tuple[str, ...]
    threads: tuple[int, ...]
    seed: int
    batches: Callable[..., Iterator[object]]
    inputs: Mapping[str, Key]
    whole: tuple[str, ...]
    training: Training
    specs: Mapping[str, Spec]


def main(bundle: Pipeline) -> None:
    """Train: parse the command line, join the other devices, run the steps."""
    options = _parser(bundle).parse_args()
    try:
        rank = _joined(bundle, options.deadline)
        torch.set_num_threads(options.threads or bundle.threads[rank])
        device = make_device(bundle, rank, options.seed, options.deadline)
        run_steps(device, options.steps, as_json=options.json)
        if options.save:
            _save(device, Path(options.save), {"steps": options.steps, "seed": options.seed})
        if options.report:  # for `bigbrain-fx run`
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            report = json.dumps({"device": device.name, "max_rss_bytes": peak})
            Path(options.report, f"{device.name}.json").write_text(report, encoding="utf-8")
        dist.barrier()  # rank 0 holds what all have joined by
        dist.destroy_process_group()
    except (CodedError, OSError) as error:
        code = f"[{error.code}]" if isinstance(error, CodedError) else ""
        sys.exit(f"error{code}: {error}")


def _joined(bundle: Pipeline, deadline_s: float) -> int:
    """Join the other devices' processes; return the rank of this one."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world != len(bundle.devices):
        need = f"this bundle needs {len(bundle.devices)} processes, one per device"
        raise MisuseError(f"{need}; WORLD_SIZE is {world}: start it by torchrun", code="BX5205")
    os.environ.setdefault("MASTER_PORT", "29500")
    if os.environ.setdefault("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo's own choice: this host's name
    dist.init_process_group("gloo", timeout=timedelta(seconds=deadline_s))
    mine = torch.tensor([int(bundle.plan, 16) >> 1])
    plans = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(plans, mine)
    if any(plan != mine for plan in plans):
        raise MisuseError("the processes run different bundles: copy one to all", code="BX5206")
    return rank


def make_device(bundle: Pipeline, rank: int, seed: int, deadline_s: float) -> PipelineDevice:
    """Build one device with its weights, its data stream and its optimizer."""
    cls, here = bundle.devices[rank], torch.device("cpu")
    ranks = {each.name: number for number, each in enumerate(bundle.devices)}
    about = bundle.inputs, bundle.whole, cls.micro_batches, here, bundle.specs
    stream = BatchStream(bundle.batches, seed, *about)
    device = cls(GlooTransport(ranks, here, deadline_s), stream, seed, here)
    weights = bundle.folder / "weights"
    owner = json.loads((weights / "index.json").read_text("utf-8"))["owner"]
    with safe_open(weights / f"{cls.name}.safetensors", framework="pt") as file:
        device.load({name: file.get_tensor(name) for name in file.keys()}, owner)  # noqa: SIM118
    device.train_with(bundle.training)
    return device


def run_steps(device: PipelineDevice, steps: int, *, as_json: bool) -> None:
    """Run the steps; print each where the loss is computed."""
    for step in range(steps):
        start = time.perf_counter()
        loss = device.run_step(step)
        if loss is not None:
            found, step_s = float(loss), time.perf_counter() - start
            line = {"step": step, "loss": found, "step_s": round(step_s, 6)}
            text = f"step {step:5d}   loss {found:.6f}   {step_s:.3f} s"
            print(json.dumps(line) if as_json else text, flush=True)


def _save(device: PipelineDevice, folder: Path, facts: Mapping[str, int]) -> None:
    """Write the device's tensors as a safetensors file, whole or not at all."""
    tensors = {name: tensor.contiguous() for name, tensor in device.state().items()}
    head: dict[str, object] = {"__metadata__": {"facts": json.dumps(facts)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        about = {"dtype": _code(tensor.dtype), "shape": [*tensor.shape]}
        head[name] = {**about, "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (part := folder / f"{device.name}.part").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    part.replace(folder / f"{device.name}.safetensors")


def _code(dtype: torch.dtype) -> str:
    """Return an element type by safetensors' name."""
    other = {torch.bfloat16: "BF16", torch.bool: "BOOL", torch.uint8: "U8", torch.complex64: "C64"}
    return other.get(dtype, f"{'F' if dtype.is_floating_point else 'I'}{8 * dtype.itemsize}")


def _parser(bundle: Pipeline) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="training steps (default 10)")
    add("--seed", type=int, default=bundle.seed, help="of data and dropout (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object a step")
    add("--save", help="write the trained tensors, one safetensors file per device, to this folder")
    add("--threads", type=int, help="threads of every process (default: the plan's)")
    add("--report", help="write each device's peak memory to this folder")
    add("--deadline", type=float, default=300.0, help="longest wait for a message, in seconds")
    return parser
