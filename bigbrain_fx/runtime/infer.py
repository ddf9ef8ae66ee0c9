"""Inference with a bundle: one process per device, or all devices in one process.

    batches ──▶ [device 0] ──▶ [device 1] ──▶ [device 2] ──▶ outputs by name, in order of the rows

This file knows how to start and how to collect; what a batch's way is, is in the device files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .coded import InputError
from .compared_stream import AgreeingTransport
from .hooked_device import HookedDevice
from .launcher import words
from .limits import LONGEST_COMPILE_S, headline, saying_limits, show, tell
from .local import Hub, LocalTransport
from .malloc import keep_freed_memory
from .peers import BAD_INPUT, blaming_peers
from .rendezvous import (
    environment_number,
    join,
    leave_together,
    own_device,
    require_gpu,
    transport_of,
    write_report,
)
from .rows import (
    Batches,
    RowStream,
    batches_of_file,
    batches_of_tensors,
    count_rows,
    require_whole,
)
from .serving import ENDLESS, ServedError, SlotPipes
from .stream import Spec
from .tensor_file import SaveError, write_tensors
from .weights import checked_weights

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

DEFAULT_STEPS = 10
Outputs = dict[str, Tensor]
OnBatch = Callable[[int, int, Outputs, float], None]  # number, rows, outputs, seconds


@dataclass(frozen=True, eq=False)
class Inference:
    """Facts of the bundle in `infer.py`.

    `rows` are those of a full batch; where they do not stand `apart`, all batches are full.
    """

    folder: Path
    plan: str
    devices: tuple[type[EvalDevice], ...]
    kinds: tuple[str, ...]
    threads: tuple[int, ...]
    seed: int
    batches: Batches
    inputs: Mapping[str, tuple[str | int, ...]]
    whole: tuple[str, ...]
    specs: Mapping[str, Spec]
    rows: int
    apart: bool = True

    @property
    def by_name(self) -> dict[str, tuple[str | int, ...]]:
        """Return the places of the inputs in a batch of tensors by name."""
        return {name: (name,) for name in self.inputs}


class EvalDevice(HookedDevice):
    """Run one device's part of every batch, forward only; of plans with more, `planned_infer` does.

    No gradients are kept (`torch.no_grad`). The numbers are those of the usual mode, and the
    outputs may be used for anything, which tensors of `torch.inference_mode` may not.

    Attributes:
        outputs: on the device that collects them, name of an output -> the dimension of its rows.
            None for an output that has one value a micro-batch.
    """

    outputs: Mapping[str, int | None] = {}
    compiled = False

    def __init__(
        self, transport: AgreeingTransport, stream: RowStream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.rows = stream
        self.collected: dict[str, list[Tensor]] = {}
        for module in self.modules.values():
            module.eval()

    # What is returned is known per stage only: one tensor as it is, several as a tuple.

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401  # above
        """Run a stage forward."""
        with self._drawing(micro):
            return self.modules[stage](**values)

    def feed(self, transport: AgreeingTransport, stream: RowStream) -> None:
        """Go on with other data, and other ways for messages."""
        self.transport, self.stream, self.rows = transport, stream, stream

    def output(self, name: str, micro: int, value: Tensor) -> None:
        """Keep an output of one micro-batch."""
        self.collected.setdefault(name, []).append(value)

    def run_batch(self, step: int) -> Outputs:
        """Run one batch; return the outputs by name where they are collected, else nothing."""
        self.collected = {}
        with torch.no_grad():
            self.run_step(step)
            return {name: self._joined(name, dim) for name, dim in self.outputs.items()}

    def _joined(self, name: str, dim: int | None) -> Tensor:
        """Join an output's micro-batches, without the rows that only filled the batch up."""
        parts, rows, room = self.collected.pop(name), self.rows.rows, self.rows.room
        if dim is None:
            used = -(-rows * len(parts) // room)
            return torch.stack(parts[:used])
        joined = torch.cat(parts, dim)
        return joined.narrow(dim, 0, joined.shape[dim] * rows // room)


def join_batches(device: type[EvalDevice], found: list[Outputs]) -> Outputs:
    """Join the outputs of several batches."""
    return {
        name: torch.cat([outputs[name] for outputs in found], dim or 0)
        for name, dim in device.outputs.items()
    }


def run_batches(device: EvalDevice, steps: int, on_batch: OnBatch | None) -> None:
    """Run batches 0 to steps-1; hand on the outputs of each where they are collected."""
    for step in range(steps):
        start = time.perf_counter()
        outputs = device.run_batch(step)
        if outputs and on_batch is not None:
            _settle(device.device)
            on_batch(step, device.rows.rows, outputs, time.perf_counter() - start)


def _settle(device: torch.device) -> None:
    """Wait until a GPU has made the outputs: so far they have only been asked for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# --------------------------------------------------------------------------- in one process


def infer_in_process(inference: Inference, inputs: Mapping[str, Tensor]) -> Outputs:
    """Return the outputs by name for input tensors by name, of any number of rows.

    Raises:
        BatchError: an input is missing, or is not like the one that the model was split with.
    """
    parts = batches_of_tensors(inputs, tuple(inference.inputs), inference.whole, inference.rows)
    found: list[Outputs] = []
    run_here(
        inference,
        lambda _: iter(parts),
        inference.by_name,
        len(parts),
        inference.seed,
        lambda *batch: found.append(batch[2]),
    )
    return join_batches(next(cls for cls in inference.devices if cls.outputs), found)


def run_here(
    inference: Inference,
    batches: Batches,
    places: Mapping[str, tuple[str | int, ...]],
    steps: int,
    seed: int,
    on_batch: OnBatch | None = None,
) -> tuple[EvalDevice, ...]:
    """Run batches with all devices in this process, in turn; return the devices.

    Args:
        inference: the bundle.
        batches: `batches(seed)` gives one batch after another.
        places: where the inputs are in a batch.
        steps: how many batches.
        seed: of the data, and of what the model draws.
        on_batch: gets the outputs of each.
    """
    devices, hub = loaded(inference), Hub()
    for device in devices:
        device.seed = seed
        device.feed(LocalTransport(hub), _stream(inference, batches, places, seed, device.device))
    hub.run({d.name: partial(run_batches, d, steps, on_batch) for d in devices})
    return devices


@lru_cache(maxsize=1)
def loaded(inference: Inference) -> tuple[EvalDevice, ...]:
    """Build all devices on the CPU, with their weights; a second call finds them as they are."""
    here, transport = torch.device("cpu"), LocalTransport(Hub())
    streams = [
        _stream(inference, inference.batches, inference.inputs, inference.seed, here)
        for _ in inference.devices
    ]
    return tuple(
        make_device(inference, rank, transport, stream, inference.seed, here)
        for rank, stream in enumerate(streams)
    )


def make_device(
    inference: Inference,
    rank: int,
    transport: AgreeingTransport,
    stream: RowStream,
    seed: int,
    where: torch.device,
) -> EvalDevice:
    """Build one device with its weights."""
    cls = inference.devices[rank]
    device = cls(transport, stream, seed, where)
    with checked_weights(inference.folder / "weights", cls.name) as weights:
        device.load(weights, {})
    return device


def _stream(
    inference: Inference,
    batches: Batches,
    places: Mapping[str, tuple[str | int, ...]],
    seed: int,
    where: torch.device,
) -> RowStream:
    micro_batches = inference.devices[0].micro_batches
    about = seed, places, inference.whole, micro_batches, where, inference.specs
    stream = RowStream(batches, *about)
    stream.apart = inference.apart
    return stream


# --------------------------------------------------------------------------- as a program


@saying_limits()
def infer_main(inference: Inference) -> None:
    """Run inference: parse the command line, join the other devices, run the batches."""
    options = _parser(inference).parse_args(words())
    seed = inference.seed if options.seed is None else options.seed
    keep_freed_memory()
    try:
        if options.serve:
            _serve(inference, seed, options)
            return
        batches, places, steps = _data(inference, options)
        shown = _Shown(options.json, Path(options.outputs) if options.outputs else None)
        if options.in_process:
            run_here(inference, batches, places, steps, seed, shown.batch)
        else:
            _run(inference, batches, places, steps, seed, options, shown.batch)
    except (InputError, SaveError) as error:
        tell(headline(error))
        sys.exit(1 if isinstance(error, SaveError) else BAD_INPUT)
    shown.end()


def _serve(inference: Inference, seed: int, options: argparse.Namespace) -> None:
    """Run the batches that a server sends, until it has no more."""
    rank = environment_number("RANK", None) if options.rank is None else options.rank
    collects = next(cls for cls in inference.devices if cls.outputs)
    serving = SlotPipes.of(
        options.serve,
        inference.devices[rank] is collects,
        inference.specs,
        inference.whole,
        collects.outputs,
        inference.rows,
    )
    places = inference.by_name
    _run(inference, serving.batches, places, ENDLESS, seed, options, serving.answer)


def _data(
    inference: Inference, options: argparse.Namespace
) -> tuple[Batches, Mapping[str, tuple[str | int, ...]], int]:
    """Return where batches come from, where the inputs are in them, and how many to run."""
    if not options.inputs:
        return inference.batches, inference.inputs, options.steps or DEFAULT_STEPS
    path, names = Path(options.inputs), tuple(inference.inputs)
    rows = count_rows(path, names, inference.whole)
    if not inference.apart:
        require_whole(rows, inference.rows)
    there = -(-rows // inference.rows)

    def batches(_: int) -> Iterator[object]:
        return batches_of_file(path, names, inference.whole, inference.rows)

    return batches, inference.by_name, min(options.steps or there, there)


def _run(
    inference: Inference,
    batches: Batches,
    places: Mapping[str, tuple[str | int, ...]],
    steps: int,
    seed: int,
    options: argparse.Namespace,
    on_batch: OnBatch,
) -> None:
    rank = environment_number("RANK", None) if options.rank is None else options.rank
    torch.set_num_threads(options.threads or inference.threads[rank])
    require_gpu(inference.kinds, rank)
    with blaming_peers(), _joined(inference, rank, options.deadline) as store:
        where = own_device(inference.kinds, rank)
        ranks = {cls.name: number for number, cls in enumerate(inference.devices)}
        remote = [c for cls in inference.devices for c in cls.channels if not c.is_local]
        transport = transport_of(ranks, where, options.deadline, store, remote)
        stream = _stream(inference, batches, places, seed, where)
        device = make_device(inference, rank, transport, stream, seed, where)
        with suppress(ServedError):
            run_batches(device, steps, on_batch)
        if options.report:
            write_report(device.name, Path(options.report))
        leave_together(store, rank, len(ranks))


@contextmanager
def _joined(inference: Inference, rank: int, deadline_s: float) -> Iterator[Store]:
    """Join the other devices' processes; give the store that all share."""
    store = join(inference.plan, inference.kinds, rank, deadline_s)
    try:
        yield store
    finally:
        dist.destroy_process_group()


class _Shown:
    """Printed and written facts of the batches, on the device that collects the outputs."""

    def __init__(self, as_json: bool, folder: Path | None) -> None:
        self.as_json = as_json
        self.folder = folder
        self.rows = 0
        self.seconds = 0.0

    def batch(self, number: int, rows: int, outputs: Outputs, batch_s: float) -> None:
        """Print one batch's line, write its outputs."""
        if self.folder is not None:
            write_tensors(outputs, self.folder / f"{number:05d}.safetensors")
        line = json.dumps({"batch": number, "rows": rows, "batch_s": round(batch_s, 6)})
        text = f"batch {number:5d}   {rows} rows   {batch_s:.3f} s"
        show(line if self.as_json else text, sys.stdout)
        self.rows += rows
        self.seconds += batch_s

    def end(self) -> None:
        """Print how fast it was."""
        if self.rows and not self.as_json:
            pace = self.rows / self.seconds if self.seconds else float("inf")
            show(f"{self.rows} rows in {self.seconds:.3f} s: {pace:.1f} rows a second", sys.stdout)


def _parser(inference: Inference) -> argparse.ArgumentParser:
    about = f"Run inference on {len(inference.devices)} devices."
    parser = argparse.ArgumentParser(prog="infer.py", description=about)
    add = parser.add_argument
    add("--inputs", help=f"safetensors file with the tensors {', '.join(inference.inputs)}")
    add("--outputs", help="write the outputs of each batch to this folder")
    text = f"(default: all of --inputs, else {DEFAULT_STEPS} of batches.py)"
    add("--steps", type=int, help=f"batches of up to {inference.rows} rows {text}")
    add("--seed", type=int, help=f"seed of the data (default {inference.seed})")
    add("--json", action="store_true", help="print one JSON object a batch")
    add("--threads", type=int, help="threads of every process (default: the plan's)")
    add("--report", help="write each device's peak memory to this folder")
    wait_s = LONGEST_COMPILE_S if any(cls.compiled for cls in inference.devices) else 300.0
    text = "longest wait for any message, in seconds (default %(default)g)"
    add("--deadline", type=float, default=wait_s, help=text)
    add("--rank", type=int, help="this process's device (default: $RANK)")
    add("--serve", help=argparse.SUPPRESS)  # by `bigbrain-fx serve`: two pipes
    add("--in-process", action="store_true", help="run all devices in this process, for pdb")
    return parser
