"""The training loop of a bundle: one process per device, or all devices in one process.

This file knows how to start and how to report; what a step does is in the device files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .bundle import Bundle, make_device, save_first_gradients
from .checkpoint_format import FencedError
from .checkpoint_options import CheckpointOptions, Ledger, add_options, is_restart, options_of
from .checkpoints import Checkpoints, begin_together, checkpoints_of
from .coded import InputError
from .finite import NOT_FINITE, POLICIES, NotFiniteError
from .launcher import as_called, words
from .limits import LONGEST_COMPILE_S, headline, saying_limits, show, tell
from .local import Hub, LocalTransport
from .malloc import keep_freed_memory
from .network import NetworkTransport
from .peers import BAD_INPUT, CONTROL, TAKEN_OVER, blaming_peers
from .rendezvous import (
    all_cuda,
    environment_number,
    join,
    leave_together,
    own_device,
    require_gpu,
    transport_of,
    write_report,
)
from .saving import contents, require_room, save_aside, save_together, say_contents
from .tensor_file import SaveError, put_all

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .device import Device  # a plain pipeline has `checked_device` for it

__all__ = ["Bundle", "main", "make_device", "run_in_process"]

LOCAL_S = 60.0  # longest wait of a device for another in this process
Report = Callable[[int, float, float], None]  # step, loss, seconds


@saying_limits()
def main(bundle: Bundle) -> None:
    """Train: parse the command line, join the other devices, run the steps."""
    parser = _parser(bundle)
    options = parser.parse_args(words())
    commits = options_of(parser, options)
    if options.transport == "nccl" and not all_cuda(bundle.kinds):
        parser.error("--transport nccl is for plans whose devices are all GPUs: leave it out")
    with _stopping_on_bad_input():
        require_room(options.save)
    seed = bundle.seed if options.seed is None else options.seed
    bundle = replace(bundle, store=options.store and str(options.store))
    keep_freed_memory()
    if options.in_process:
        with _stopping_on_bad_input():
            _run_here(bundle, seed, options, commits)
        return
    if CONTROL in os.environ:  # a supervisor's process; a bundle of `split --lean` has none
        from .control import Control
        from .member import serve

        serve(bundle, options, commits, seed, Control.inherited())
        return
    rank = environment_number("RANK", None) if options.rank is None else options.rank
    torch.set_num_threads(options.threads or bundle.threads[rank])
    with _stopping_on_bad_input():
        require_gpu(bundle.kinds, rank)
        if (bundle.folder / "runtime" / "addresses.py").is_file():  # the plan has several hosts
            from .addresses import require_address

            require_address(bundle.folder)
        if options.transport == "mpi" and not (bundle.folder / "runtime" / "mpi.py").is_file():
            raise InputError(
                "--transport mpi needs a bundle that was split with `--with mpi`", code="BX5199"
            )
    with blaming_peers():
        backend = options.transport if options.transport in ("gloo", "nccl") else ""
        store = join(bundle.plan, bundle.kinds, rank, options.deadline, backend)
        try:
            with _stopping_on_bad_input():
                _run(bundle, rank, seed, store, options, commits)
        finally:
            dist.destroy_process_group()


def _run_here(
    bundle: Bundle, seed: int, options: argparse.Namespace, commits: CheckpointOptions | None
) -> None:
    """Run all devices in this process, and write what the options ask for."""
    folder = options.first_gradients
    keep = partial(save_first_gradients, Path(folder)) if folder else None
    report = _printer(options.json)
    threads = [options.threads or count for count in bundle.threads]
    devices = run_in_process(
        bundle, options.steps, seed, report, keep, commits, options.on_nan, threads
    )
    if options.save:
        told = [contents(device) for device in devices.values()]
        for device in devices.values():
            say_contents(device, told)
        aside = [save_aside(device, Path(options.save)) for device in devices.values()]
        put_all(aside)


@contextmanager
def _stopping_on_bad_input() -> Iterator[None]:
    try:
        yield
    except (InputError, FencedError, NotFiniteError, SaveError) as error:
        tell(headline(error))
        codes = {FencedError: TAKEN_OVER, NotFiniteError: NOT_FINITE}
        sys.exit(codes.get(type(error), BAD_INPUT))


def run_in_process(
    bundle: Bundle,
    steps: int,
    seed: int,
    report: Report | None = None,
    after_step: Callable[[Device, int], None] | None = None,
    commits: CheckpointOptions | None = None,
    on_nan: str = "stop",
    threads: Sequence[int] = (),
) -> dict[str, Device]:
    """Run all devices in this process, in turn; return them, trained.

    threads: CPU threads that each device computes with; as the caller has set them if empty.
    """
    names = [cls.name for cls in bundle.devices]
    hub = Hub(dict(zip(names, threads, strict=False)))
    devices = {
        cls.name: make_device(bundle, rank, LocalTransport(hub), seed, torch.device("cpu"))
        for rank, cls in enumerate(bundle.devices)
    }
    for device in devices.values():
        device.on_nan = on_nan
        device.of_run = {"steps": steps, "seed": seed}
    first = 0
    ledger = Ledger(dist.HashStore(), LOCAL_S)  # type: ignore[attr-defined]  # torch has it
    parts: dict[str, Checkpoints] = {}
    if commits is not None:
        parts = {
            name: checkpoints_of(Checkpoints, bundle, d, ledger, commits, in_background=False)
            for name, d in devices.items()
        }
        first = begin_together(parts, devices, resume=commits.resume)
    hub.run(
        {
            name: partial(run_steps, d, steps, report, after_step, first, parts.get(name))
            for name, d in devices.items()
        }
    )
    return devices


def run_steps(
    device: Device,
    steps: int,
    report: Report | None,
    after_step: Callable[[Device, int], None] | None = None,
    first: int = 0,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Run the steps from `first` to steps-1; report each where the loss is made."""
    device.goes_on_after = partial(_goes_on, steps, checkpoints)
    for step in range(first, steps):
        start = time.perf_counter()
        loss = device.run_step(step)
        if loss is not None and report is not None:
            report(step, float(loss), time.perf_counter() - start)
        if after_step is not None:
            after_step(device, step)
        if checkpoints is not None:
            checkpoints.after_step(device, step)
    if checkpoints is not None:
        checkpoints.close(device)


def _goes_on(steps: int, checkpoints: Checkpoints | None, step: int) -> bool:
    """Whether a step may run into the next: there is one, and no state is taken between them."""
    return step + 1 < steps and not (checkpoints is not None and checkpoints.is_due(step))


def _run(
    bundle: Bundle,
    rank: int,
    seed: int,
    store: Store,
    options: argparse.Namespace,
    commits: CheckpointOptions | None,
) -> None:
    where = own_device(bundle.kinds, rank)
    ranks = {cls.name: number for number, cls in enumerate(bundle.devices)}
    transport: NetworkTransport
    if options.transport == "mpi":
        from .mpi import MpiTransport  # only bundles of --with mpi have it

        transport = MpiTransport(bundle, rank, where, options.deadline, store)
    else:
        remote = [channel for cls in bundle.devices for channel in cls.messaging()]
        transport = transport_of(ranks, where, options.deadline, store, remote)
    device = make_device(bundle, rank, transport, seed, where)
    device.on_nan = options.on_nan
    device.of_run = {"steps": options.steps, "seed": seed}
    folder = options.first_gradients
    keep = partial(save_first_gradients, Path(folder)) if folder else None
    first, checkpoints = 0, None
    ledger = Ledger(store, options.deadline, as_json=options.json)
    if commits is not None:
        checkpoints = checkpoints_of(Checkpoints, bundle, device, ledger, commits)
        first = checkpoints.begin(device, resume=commits.resume, restarted=is_restart())
    run_steps(device, options.steps, _printer(options.json), keep, first, checkpoints)
    if options.save:
        save_together(device, Path(options.save), ledger)
    if options.report:
        write_report(device.name, Path(options.report))
    leave_together(store, rank, len(ranks))
    transport.leave()


def _printer(as_json: bool) -> Report:
    def report(step: int, loss: float, step_s: float) -> None:
        line = json.dumps({"step": step, "loss": loss, "step_s": round(step_s, 6)})
        text = line if as_json else f"step {step:5d}   loss {loss:.6f}   {step_s:.3f} s"
        show(text, sys.stdout)

    return report


def _parser(bundle: Bundle) -> argparse.ArgumentParser:
    about = f"Train on {len(bundle.devices)} devices."
    parser = argparse.ArgumentParser(prog="train.py", description=about)
    add = parser.add_argument
    add("--steps", type=int, default=10, help="training steps (default 10)")
    add("--seed", type=int, help=f"seed of data and dropout (default {bundle.seed})")
    add("--json", action="store_true", help="print one JSON object a step")
    here = "one safetensors file per device, to this folder"
    add("--save", type=as_called, help=f"write the trained tensors, {here}")
    add("--first-gradients", type=as_called, help=f"write the gradients of step 0, {here}")
    add("--threads", type=int, help="threads of every process (default: the plan's)")
    text = "stop the run, skip the update on all devices, or ignore it (default stop)"
    text = f"at a loss or gradient that is not finite: {text}"
    add("--on-nan", choices=POLICIES, default="stop", help=text)
    add("--report", type=as_called, help="write each device's peak memory to this folder")
    wait_s = LONGEST_COMPILE_S if any(device.compiled for device in bundle.devices) else 300.0
    text = "longest wait for any message, in seconds (default %(default)g)"
    add("--deadline", type=float, default=wait_s, help=text)
    add("--rank", type=int, help="this process's device (default: $RANK)")
    add("--in-process", action="store_true", help="run all devices in this process, for pdb")
    text = (
        "what carries messages: gloo, through host memory; nccl, where all devices are GPUs; or "
        "MPI, where mpirun has started this (default torch: nccl where it can be, else gloo)"
    )
    add("--transport", choices=("torch", "gloo", "nccl", "mpi"), default="torch", help=text)
    add_options(parser)
    parser.set_defaults(store=None)
    if any(device.offload for device in bundle.devices):
        from .offloading import add_store  # only bundles that offload have it

        add_store(parser)
    return parser


if __name__ == "__main__":
    sys.exit("error[BX5908]: run train.py of the bundle")
