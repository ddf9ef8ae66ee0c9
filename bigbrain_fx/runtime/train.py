"""The training loop of a bundle: one process per device, or all devices in one process.

This file knows how to start and how to report; what a step does is in the device files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from .data import BatchError, Spec, Stream
from .device import Device, Training, Transport
from .local import Hub, LocalTransport
from .malloc import keep_freed_memory
from .network import NetworkTransport
from .peers import blaming_peers
from .rendezvous import environment_number, join, leave_together, own_device, write_report
from .weights import OwnWeights

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BAD_INPUT = 2  # exit code; as argparse's
Report = Callable[[int, float, float], None]  # step, loss, seconds


@dataclass(frozen=True)
class Bundle:
    """What `train.py` says of the bundle."""

    folder: Path
    plan: str
    devices: tuple[type[Device], ...]
    kinds: tuple[str, ...]
    threads: tuple[int, ...]
    seed: int
    batches: Callable[[int], Iterator[object]]
    inputs: Mapping[str, tuple[str | int, ...]]
    whole: tuple[str, ...]
    training: Training
    specs: Mapping[str, Spec] = field(default_factory=dict)


def main(bundle: Bundle) -> None:
    """Train: parse the command line, join the other devices, run the steps."""
    options = _parser(bundle).parse_args()
    seed = bundle.seed if options.seed is None else options.seed
    keep_freed_memory()
    if options.in_process:
        run_in_process(bundle, options.steps, seed, _printer(options.json))
        return
    rank = environment_number("RANK", options.rank)
    torch.set_num_threads(options.threads or bundle.threads[rank])
    with blaming_peers():
        store = join(bundle.plan, bundle.kinds, rank, options.deadline)
        try:
            _run(bundle, rank, seed, store, options)
        except BatchError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(BAD_INPUT)
        finally:
            dist.destroy_process_group()


def run_in_process(
    bundle: Bundle,
    steps: int,
    seed: int,
    report: Report | None = None,
    after_step: Callable[[Device, int], None] | None = None,
) -> dict[str, Device]:
    """Run all devices in this process, in turn; return them, trained."""
    hub = Hub()
    devices = {
        cls.name: make_device(bundle, rank, LocalTransport(hub), seed, torch.device("cpu"))
        for rank, cls in enumerate(bundle.devices)
    }
    hub.run({name: partial(run_steps, d, steps, report, after_step) for name, d in devices.items()})
    return devices


def make_device(
    bundle: Bundle, rank: int, transport: Transport, seed: int, where: torch.device
) -> Device:
    """Build one device with its weights, its data stream and its optimizer."""
    cls = bundle.devices[rank]
    stream = Stream(
        bundle.batches, seed, bundle.inputs, bundle.whole, cls.micro_batches, where, bundle.specs
    )
    device = cls(transport, stream, seed, where)
    weights = bundle.folder / "weights"
    owner = json.loads((weights / "index.json").read_text())
    device.load(OwnWeights(weights, cls.name), owner)
    device.train_with(bundle.training)
    return device


def run_steps(
    device: Device,
    steps: int,
    report: Report | None,
    after_step: Callable[[Device, int], None] | None = None,
) -> None:
    """Run steps 0 to steps-1; report each where the loss is made."""
    for step in range(steps):
        start = time.perf_counter()
        loss = device.run_step(step)
        if loss is not None and report is not None:
            report(step, float(loss), time.perf_counter() - start)
        if after_step is not None:
            after_step(device, step)


def example_batches(path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the example batch again and again: the model file has no `batches`."""
    batch = load_file(path)
    while True:
        yield batch


def _run(bundle: Bundle, rank: int, seed: int, store: Store, options: argparse.Namespace) -> None:
    where = own_device(bundle.kinds[rank])
    ranks = {cls.name: number for number, cls in enumerate(bundle.devices)}
    remote = [c for c in bundle.devices[rank].channels if not c.is_local]
    transport = NetworkTransport(ranks, where, options.deadline, store, remote)
    device = make_device(bundle, rank, transport, seed, where)
    folder = options.first_gradients
    keep = partial(_save_first_gradients, Path(folder)) if folder else None
    run_steps(device, options.steps, _printer(options.json), keep)
    if options.save:
        _save(device, Path(options.save))
    if options.report:
        write_report(device.name, Path(options.report))
    leave_together(store, rank, len(ranks))


def _save(device: Device, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().clone() for name, tensor in device.state().items()}
    save_file(tensors, folder / f"{device.name}.safetensors")


def _save_first_gradients(folder: Path, device: Device, step: int) -> None:
    if step == 0 and device.first_gradients:
        folder.mkdir(parents=True, exist_ok=True)
        gradients = {
            name: g.cpu().contiguous().clone() for name, g in device.first_gradients.items()
        }
        save_file(gradients, folder / f"{device.name}.safetensors")


def _printer(as_json: bool) -> Report:
    def show(step: int, loss: float, step_s: float) -> None:
        line = json.dumps({"step": step, "loss": loss, "step_s": round(step_s, 6)})
        print(line if as_json else f"step {step:5d}   loss {loss:.6f}   {step_s:.3f} s", flush=True)

    return show


def _parser(bundle: Bundle) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py", description=f"Train on {len(bundle.devices)} devices."
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps (default 10)")
    parser.add_argument(
        "--seed", type=int, default=None, help=f"seed of data and dropout (default {bundle.seed})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a step")
    parser.add_argument(
        "--save", help="write the trained tensors, one safetensors file per device, to this folder"
    )
    parser.add_argument("--first-gradients", help="write the gradients of step 0 to this folder")
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of every process (default: the plan's)"
    )
    parser.add_argument("--report", help="write each device's peak memory to this folder")
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="longest wait for any message, in seconds"
    )
    parser.add_argument(
        "--rank", type=int, default=None, help="this process's device (default: $RANK)"
    )
    parser.add_argument(
        "--in-process", action="store_true", help="run all devices in this process, for pdb"
    )
    return parser


if __name__ == "__main__":
    sys.exit("run train.py of the bundle")
