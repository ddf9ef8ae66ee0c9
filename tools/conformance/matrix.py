"""The promise, cell by cell: every model × partitioner × number of devices × schedule, bit for bit.

    python -m tools.conformance matrix [--models gpt,moe] [--devices 2,4] [--processes 6] [--json]
    python -m tools.conformance matrix --cell gpt/analytical/2/1f1b --cell moe/scattered/4/list/gloo
    python -m tools.conformance matrix --schedules zb-v,interleaved,auto --partitioners naive
    python -m tools.conformance matrix --replicas 2,3 [--cell gpt/naive/2/1f1b/r2z1tree]
    python -m tools.conformance matrix --replicas 2 --tensor 2 [--cell gpt/naive/2/1f1b/t2r2z1tree]

Each model is captured once. A cell plans, writes the bundle, imports it, trains it for some AdamW
steps (`--steps`, five) and compares with the one-process reference: all losses, every gradient of
step 0, every tensor at the end, byte by byte. `--processes N` runs N cells, spread over the table,
as real processes over gloo; those train with the model file's own optimizer. `--replicas` makes
another table: so many replicas of pipelines of one and two devices, every ZeRO stage, every order
of sums; with `--tensor` groups of so many devices stand for each device.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

from bigbrain_fx.bundles.launch import RunOptions, Spawn, run
from bigbrain_fx.core import Cluster, Device, DeviceStore, Link, Offloaded
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import Captured, ModelFile, capture, load_model_file
from bigbrain_fx.frontend.tracing.optimizers.memory import optimizer_facts
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.offloading import read_offload
from bigbrain_fx.plan.recompute import Wanted, read_recompute
from bigbrain_fx.planning.registry import load, preset
from bigbrain_fx.verification.imported_bundle import (
    batches_of,
    import_bundle,
    run_bundle,
    trace_of_processes,
    weights_of,
)
from bigbrain_fx.verification.links import same_training
from bigbrain_fx.verification.reference import MembersReference
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.verification.training import train_reference, trained_once

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("gpt", "llama", "resnet", "unet", "encdec", "moe", "digits")
PARTITIONERS = ("naive", "analytical", "scattered")
DEVICES = (2, 3, 4)
CHAIN_SCHEDULES = ("gpipe", "1f1b", "list", "zb-h1")
MICRO_BATCHES = 4
STEPS = 5
SPEEDS = (60e9, 30e9, 45e9, 60e9)  # FLOP/s: unlike devices, so that the cuts differ from naive's
DEADLINE_S = 120.0
ZERO = (0, 1, 2, 3)
ORDERS = ("replica", "micro", "tree")
COPIES = re.compile(rf"(?:t(\d+))?r(\d+)z([0-3])({'|'.join(ORDERS)})")


@dataclass(frozen=True)
class Cell:
    """One cell of the table; `transport` is in-process or gloo."""

    model: str
    partitioner: str
    devices: int
    schedule: str
    transport: str = "in-process"
    copies: str = ""  # "r2z1tree": two replicas, ZeRO 1, sums by the tree; "t2": in groups of two


@dataclass(frozen=True)
class Row:
    """Outcome of a cell; `fault` is empty where all is equal."""

    cell: Cell
    stages: int
    fault: str
    seconds: float

    def __str__(self) -> str:
        """Show the cell as one line of the table."""
        cell = self.cell
        left = f"{cell.model:8}{cell.partitioner:12}{cell.devices} {cell.schedule:12}"
        left += f"{cell.copies:12}" if cell.copies else ""
        right = f"{cell.transport:11}{self.stages:3} stages {self.seconds:6.2f} s"
        return f"{left}{right}  {self.fault or 'equal'}"


def cells(
    models: Sequence[str],
    partitioners: Sequence[str],
    devices: Sequence[int],
    schedules: Sequence[str] = CHAIN_SCHEDULES,
) -> tuple[Cell, ...]:
    """List the table, model by model."""
    return tuple(
        Cell(model, partitioner, count, schedule)
        for model, partitioner, count in itertools.product(models, partitioners, devices)
        for schedule in (("list",) if partitioner == "scattered" else schedules)
    )


def replicated(
    models: Sequence[str], replicas: Sequence[int], members: int = 1
) -> tuple[Cell, ...]:
    """List the table of replicas, naive pipelines; ZeRO divides among several only."""
    groups = f"t{members}" if members > 1 else ""
    ways = itertools.product(models, (1, 2), replicas, ZERO, ORDERS)
    return tuple(
        Cell(model, "naive", devices, "1f1b", copies=f"{groups}r{count}z{zero}{order}")
        for model, devices, count, zero, order in ways
        if not (zero >= 2 and order == "replica") and not (zero and count == 1)
    )


def over_gloo(table: Sequence[Cell], count: int) -> tuple[Cell, ...]:
    """Turn `count` cells, spread over the table, into cells of real processes."""
    step = len(table) / max(1, min(count, len(table)))
    chosen = {int((i + 0.5) * step) for i in range(min(count, len(table)))}
    return tuple(
        replace(cell, transport="gloo") if index in chosen else cell
        for index, cell in enumerate(table)
    )


def parse_cell(text: str) -> Cell:
    """Read "gpt/analytical/2/1f1b", or the same with "/t2r2z1tree" or "/gloo" behind it."""
    parts = text.split("/")
    copies = [part for part in parts[4:] if COPIES.fullmatch(part)]
    others = [part for part in parts[4:] if part not in copies]
    if len(parts) < 4 or not parts[2].isdigit() or len(copies) > 1 or len(others) > 1:
        raise click.BadParameter(f"expected gpt/analytical/2/1f1b[/r2z1tree][/gloo], found {text}")
    model, partitioner, count, schedule = parts[:4]
    transport = others[0] if others else "in-process"
    return Cell(model, partitioner, int(count), schedule, transport, "".join(copies))


def _replicas(cell: Cell) -> dict[str, Any]:
    """Return a cell's replicas as options; nothing, where it has one."""
    found = COPIES.fullmatch(cell.copies)
    if found is None:
        return {}
    members, count, zero, order = found.groups()
    copies = {"replicas": int(count), "zero_stage": int(zero), "sum_order": order}
    return {**copies, "tensor": int(members or 1)}


@dataclass
class Bench:
    """A captured model, and the references that were trained for it, by plan."""

    file: ModelFile
    captured: Captured
    steps: int = STEPS
    recompute: Wanted = None
    offload: tuple[Offloaded, ...] = ()
    references: dict[str, Trace] = field(default_factory=dict)

    @staticmethod
    def of(
        model: str,
        steps: int = STEPS,
        recompute: Wanted = None,
        offload: tuple[Offloaded, ...] = (),
    ) -> Bench:
        """Load and capture a model of models/."""
        file = load_model_file(ROOT / "models" / f"{model}.py")
        captured = capture(file.model, file.example_batch, file.loss, name=model)
        return Bench(file, captured, steps, recompute, offload)

    def plan(self, cell: Cell) -> Plan:
        """Plan a cell."""
        file = self.file
        held = optimizer_facts(file.model, file.optimizer)
        source = Source(
            str(file.path),
            file.batches is not None,
            file.optimizer is not None,
            file.loss is not None,
            file.lr_scale is not None,
            file.clip_norm,
            "",
            optimizer_state=held.state,
            optimizer_temporaries=held.temporaries,
            optimizer_leftover=held.leftover,
            optimizer_states=held.states,
            optimizer_at_once=held.at_once,
        )
        partitioner, estimator = preset(cell.partitioner)
        options = Options(
            partitioner,
            estimator,
            cell.schedule,
            MICRO_BATCHES,
            recompute=self.recompute,
            offload=self.offload,
            **_replicas(cell),
        )
        count = cell.devices * (options.replicas or 1) * (options.tensor or 1)
        where = cluster(count, alike=bool(cell.copies))
        where = with_stores(where) if self.offload else where
        return make_plan(self.captured.graph, where, source, options)

    def fault(self, cell: Cell, plan: Plan) -> str:
        """Train a cell both ways; say what differs first, or nothing."""
        with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
            folder = write_bundle(plan, self, Path(scratch, "bundle"))
            real = cell.transport == "gloo"
            with imported(folder, force_adamw=not real) as bundle:
                expected = self.reference(plan, folder, bundle)
                if real:
                    actual = run_processes(folder, Path(scratch), self.steps)
                else:
                    actual = run_bundle(bundle, plan, self.steps, plan.seed)
        failed = [c for c in same_training(plan, expected, actual) if c["passed"] is False]
        found = "; ".join(f"{c['name']}: {c['detail']}" for c in failed)
        return found or other_bytes(expected, actual)

    def reference(self, plan: Plan, folder: Path, bundle: ModuleType) -> Trace:
        """Train in one process; a plan with the same stages has the same reference."""
        optimizer = bundle.BUNDLE.training.optimizer  # each bundle has its own copy
        key = f"{self.steps} {plan.stages} {optimizer.__module__}.{optimizer.__qualname__}"
        if key not in self.references:
            functions, weights = self.captured.functions, weights_of(folder, plan)
            how = batches_of(bundle, plan), bundle.BUNDLE.training, self.steps, plan.seed
            if plan.placement.tensor is None:
                about = plan.graph, plan.stages, weights, functions
                self.references[key] = trained_once(about, *how)
            else:
                members = MembersReference(plan, weights, functions)
                self.references[key] = train_reference(members, *how)
        return self.references[key]

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write the model's tensors: the matrix is its own capture session."""
        for name, tensors in files.items():
            save_file({t: _own(self.captured.tensors[t]) for t in tensors}, folder / name)

    def write_batch(self, path: Path) -> None:
        """Write the example batch."""
        save_file({name: _own(value) for name, value in self.captured.inputs().items()}, path)


def cluster(count: int, *, alike: bool = False) -> Cluster:
    """Return `count` CPU devices on one host, of unlike speeds unless they shall be alike."""
    speeds = itertools.repeat(SPEEDS[0], count) if alike else SPEEDS
    made = (Device(f"d{i}", "h", "cpu", 2**33, s, 12e9, 1e-6) for i, s in enumerate(speeds))
    return Cluster(tuple(itertools.islice(made, count)), Link(50e-6, 1e9))


def with_stores(where: Cluster) -> Cluster:
    """Return a cluster whose devices have stores in the folder for what is temporary."""
    stores = (
        DeviceStore(f"disk-{device.name}", device.name, 2**40, 1e9, tempfile.gettempdir())
        for device in where.devices
    )
    return replace(where, stores=tuple(stores))


@contextmanager
def imported(folder: Path, *, force_adamw: bool) -> Iterator[ModuleType]:
    """Import a bundle's train.py; afterwards forget all modules of the bundle.

    On demand its optimizer becomes AdamW where the model file names another.
    """
    path = list(sys.path)
    bundle = import_bundle(folder)
    if force_adamw:
        _force_adamw(bundle)
    try:
        yield bundle
    finally:
        sys.path[:] = path
        home = str(folder.resolve())
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(home):
                del sys.modules[name]


def _force_adamw(bundle: ModuleType) -> None:
    training, adamw = bundle.BUNDLE.training, sys.modules["runtime.recipe"].adamw
    named = [("weight", torch.nn.Parameter(torch.zeros(1)))]
    if not isinstance(training.optimizer(named), torch.optim.AdamW):
        changed = replace(bundle.BUNDLE, training=replace(training, optimizer=adamw))
        bundle.__dict__["BUNDLE"] = changed


def run_processes(folder: Path, scratch: Path, steps: int, spawn: Spawn | None = None) -> Trace:
    """Run the bundle as one process per device, over gloo on the loopback."""
    options = RunOptions(
        steps,
        deadline_s=DEADLINE_S,
        save=scratch / "tensors",
        first_gradients=scratch / "gradients",
        threads=1,
        logs=scratch / "logs",
    )
    done = run(folder, options, spawn=spawn)
    return trace_of_processes(
        [line.loss for line in done.steps], scratch / "gradients", scratch / "tensors"
    )


def other_bytes(expected: Trace, actual: Trace) -> str:
    """Say which tensor is equal but has other bytes (-0.0 for 0.0), if any."""
    pairs = [
        (f"loss {i}", a, b)
        for i, (a, b) in enumerate(zip(expected.losses, actual.losses, strict=True))
    ]
    for what in ("gradients", "tensors"):
        want, found = getattr(expected, what), getattr(actual, what)
        pairs += [(f"{what} {n}", want[n], found[n]) for n in want if n in found]
    return ", ".join(name for name, want, found in pairs if _bytes(want) != _bytes(found))


def rows(
    wanted: Sequence[Cell],
    steps: int = STEPS,
    recompute: Wanted = None,
    offload: tuple[Offloaded, ...] = (),
) -> Iterator[Row]:
    """Run cells in order; a model is captured when its first cell comes."""
    for model, group in itertools.groupby(wanted, key=lambda cell: cell.model):
        bench = Bench.of(model, steps, recompute, offload)
        for cell in group:
            start, stages = time.perf_counter(), 0
            try:
                plan = bench.plan(cell)
                stages = len(plan.stages.stages)
                fault = bench.fault(cell, plan)
            except BigBrainError as error:
                fault = f"{type(error).__name__}: {error}"
            yield Row(cell, stages, fault, round(time.perf_counter() - start, 2))


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().clone()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--partitioners", default=",".join(PARTITIONERS), show_default=True)
@click.option("--devices", default=",".join(map(str, DEVICES)), show_default=True)
@click.option("--schedules", default=",".join(CHAIN_SCHEDULES), show_default=True)
@click.option("--replicas", default="", help="2,3: the table of replicas instead.")
@click.option("--tensor", default=1, help="2: with --replicas, in tensor groups of two.")
@click.option("--cell", "chosen", multiple=True, help="This cell, instead of a table.")
@click.option("--processes", default=0, help="So many cells as real processes over gloo.")
@click.option("--steps", default=STEPS, show_default=True, help="Steps to train in each cell.")
@click.option("--recompute", help="What runs forward again: all, ops, or stages 0,2.")
@click.option("--offload", help="What lies in stores: activations,state.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a cell.")
def main(
    models: str,
    partitioners: str,
    devices: str,
    schedules: str,
    replicas: str,
    tensor: int,
    chosen: tuple[str, ...],
    processes: int,
    steps: int,
    recompute: str | None,
    offload: str | None,
    as_json: bool,
) -> None:
    """Run the table, or chosen cells; exit code 5 where one differs."""
    torch.set_num_threads(1)
    load("partitioner")  # before a model's folder joins sys.path
    load("estimator")
    counts = [int(number) for number in _names(devices)]
    table = cells(_names(models), _names(partitioners), counts, _names(schedules))
    if replicas:
        numbers = [int(number) for number in _names(replicas)]
        table = replicated(_names(models), numbers, tensor)
    wanted = tuple(map(parse_cell, chosen)) or over_gloo(table, processes)
    bad = 0
    for row in rows(wanted, steps, read_recompute(recompute), read_offload(offload)):
        bad += bool(row.fault)
        click.echo(json.dumps(asdict(row)) if as_json else str(row))
    if not as_json:
        click.echo(f"{len(wanted) - bad} of {len(wanted)} cells equal")
    sys.exit(5 if bad else 0)


if __name__ == "__main__":
    main()
