"""Forecast against measured peak memory: every model x partitioner x number of devices x schedule.

    python -m tools.conformance memory [--models gpt,moe] [--devices 2] [--recompute all]
    python -m tools.conformance memory --models gpt --devices 1 --copies r4z3micro

A row is one device of one bundle, run as real processes over gloo. `tracked` is the peak of live
tensor bytes, `resident` VmHWM less a warmed baseline, for every n-th bundle (`--resident`).
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch

from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.offloading import read_offload
from bigbrain_fx.plan.recompute import read_recompute
from bigbrain_fx.planning.registry import load
from tools.conformance.live_bytes import resident_bytes, tracked_bytes
from tools.conformance.matrix import MODELS, Bench, Cell

PARTITIONERS = ("naive", "analytical")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
UNDER = -0.02
OVER = 0.05


@dataclass(frozen=True)
class Row:
    """One device of one bundle.

    `reserved_bytes` is what a plan is refused by; `resident_bytes` is 0 where it was not measured.
    """

    model: str
    partitioner: str
    devices: int
    schedule: str
    device: str
    forecast_bytes: int
    tracked_bytes: int
    resident_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def error(self) -> float:
        """Forecast over tracked, less one."""
        return self.forecast_bytes / self.tracked_bytes - 1

    def __str__(self) -> str:
        """Show it as a line of the table."""
        where = f"{self.model:8}{self.partitioner:11}{self.devices} {self.schedule:12}{self.device}"
        sizes = f"{_mib(self.forecast_bytes)}{_mib(self.tracked_bytes)}{100 * self.error:+7.1f} %"
        if not self.resident_bytes:
            return f"{where} {sizes}"
        return f"{where} {sizes}{_mib(self.reserved_bytes)}{_mib(self.resident_bytes)}"


@dataclass(frozen=True)
class Summary:
    """All rows: the mean of the absolute errors, the worst over and under, who is out of bounds."""

    rows: int
    mape: float
    worst_over: float
    worst_under: float
    within: int
    resident_rows: int
    resident_over: int


def cells(
    models: Sequence[str],
    devices: Sequence[int],
    partitioners: Sequence[str] = PARTITIONERS,
    schedules: Sequence[str] = SCHEDULES,
) -> tuple[Cell, ...]:
    """List the bundles, model by model."""
    return tuple(
        Cell(model, partitioner, count, schedule)
        for model, partitioner, count, schedule in itertools.product(
            models, partitioners, devices, schedules
        )
    )


def measure(bench: Bench, cell: Cell, resident: bool) -> Iterator[Row]:
    """Run one bundle and compare every device."""
    plan = bench.plan(cell)
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        bundle = write_bundle(plan, bench, Path(scratch, "bundle"))
        tracked = tracked_bytes(bundle, Path(scratch, "tracked"))
        found = resident_bytes(bundle, Path(scratch, "resident")) if resident else {}
    yield from _rows(cell, plan, tracked, found)


def _rows(
    cell: Cell, plan: Plan, tracked: Mapping[str, int], resident: Mapping[str, int]
) -> Iterator[Row]:
    for entry in plan.forecast.devices:
        name = entry.device
        yield Row(
            cell.model,
            cell.partitioner,
            cell.devices,
            cell.schedule,
            name,
            entry.peak_bytes,
            tracked[name],
            resident.get(name, 0),
            needed_bytes(entry, plan.cluster.device[name]),
        )


def summary(rows: Sequence[Row]) -> Summary:
    """Put all rows in one line."""
    errors = [row.error for row in rows]
    resident = [row for row in rows if row.resident_bytes]
    return Summary(
        len(rows),
        statistics.mean(map(abs, errors)),
        max(errors),
        min(errors),
        sum(UNDER <= error <= OVER for error in errors),
        len(resident),
        sum(row.resident_bytes > row.reserved_bytes for row in resident),
    )


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--devices", default="2,3", show_default=True)
@click.option("--partitioners", default=",".join(PARTITIONERS), show_default=True)
@click.option("--schedules", default=",".join(SCHEDULES), show_default=True)
@click.option("--resident", default=8, show_default=True, help="Every n-th bundle; 0: none.")
@click.option("--recompute", help="Stages that run forward again: all, or 0,2.")
@click.option("--offload", help="What lies in stores: activations,state.")
@click.option("--copies", default="", help="r4z3micro: four replicas of each, ZeRO 3, by number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a row, then the summary.")
def main(
    models: str,
    devices: str,
    partitioners: str,
    schedules: str,
    resident: int,
    recompute: str | None,
    offload: str | None,
    copies: str,
    as_json: bool,
) -> None:
    """Print forecast, tracked and resident peak of every device, and what they come to."""
    torch.set_num_threads(1)
    load("partitioner")  # before a model's folder joins sys.path
    load("estimator")
    counts = [int(count) for count in devices.split(",")]
    table = cells(models.split(","), counts, partitioners.split(","), schedules.split(","))
    if copies:
        table = tuple(replace(c, copies=copies) for c in table if c.schedule == "1f1b")
    found: list[Row] = []
    if not as_json:
        click.echo("model   partitioner  bundle   forecast   tracked    error  reserved  resident")
    for model, group in itertools.groupby(enumerate(table), key=lambda entry: entry[1].model):
        bench = Bench.of(model, recompute=read_recompute(recompute), offload=read_offload(offload))
        for number, cell in group:
            rows = measure(bench, cell, bool(resident) and number % resident == 0)
            for row in _or_refused(rows, cell):
                found.append(row)
                click.echo(json.dumps(asdict(row)) if as_json else str(row))
    total = summary(found)
    click.echo(json.dumps(asdict(total)) if as_json else str(total))


def _or_refused(rows: Iterator[Row], cell: Cell) -> Iterator[Row]:
    """Yield a bundle's rows; where its schedule cannot run such stages, say so."""
    try:
        yield from rows
    except InputError as error:
        click.echo(
            f"{cell.model} {cell.partitioner} {cell.devices} {cell.schedule}: {error}", err=True
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:10.2f}"


if __name__ == "__main__":
    main()
