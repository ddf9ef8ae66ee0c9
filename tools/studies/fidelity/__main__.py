"""Forecast against measured on emulated clusters: models x clusters x schedules x splits.

    python -m tools.studies.fidelity --out rows.jsonl [--cells 96] [--only gpt/] [--json]
    python -m tools.studies.fidelity --out rows.jsonl --report [--source share]
        [--write results.md]

Linux and root. Rows are added one by one; a run that was stopped goes on where it was. One
emulation is kept for all cells of a cluster. Five forecasts of every cell:

devices      ops profiled on the emulated devices, all at once, before the first cell of a model;
             links as described, the overheads that doctor finds there
steady       as devices, but the time between steps in a row (`tools.studies.fidelity.steady`)
survey       ops profiled on the bare machine, scaled to the devices, links and overheads that
             `doctor` finds there
share        the same ops over each device's share of a core, links and overheads as in devices
analytical   the roofline, on the cluster of `survey`

Cells are placed on the cluster as described, so that the same cells come out each time.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import click
import torch

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import RunOptions
from bigbrain_fx.core import Cluster, Costs, Placement
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import CaptureSession
from bigbrain_fx.plan import (
    Options,
    Plan,
    costs_of,
    make_plan,
    measured_share,
    plan_placed,
    with_placement,
)
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.planning.registry import estimator, load, preset
from tools.conformance.live_bytes import resident_bytes, tracked_bytes
from tools.studies.emulated_models import MICRO_BATCHES, SITES
from tools.studies.emulation import Network, emulated
from tools.studies.fidelity.bench import (
    SOURCES,
    Bench,
    Place,
    Say,
    Sitting,
)
from tools.studies.fidelity.cells import PARTITIONERS, Cell, placed_as, subset
from tools.studies.fidelity.docs import write_page
from tools.studies.fidelity.drift import Ground, grounds
from tools.studies.fidelity.reference import Reference
from tools.studies.fidelity.report import (
    HEADER,
    best_source,
    noise_floor,
    row_line,
    summary,
    summary_lines,
)
from tools.studies.fidelity.rows import Row, append_row, read_rows

PATH = click.Path(path_type=Path)


@dataclass(frozen=True)
class Repeats:
    """How often: runs of a cell, steps of a run besides its first, cells to one with memory.

    A run is not quiet when more than `quiet` of all processors' time was in use: devices take half.
    """

    runs: int = 5
    steps: int = 5
    memory: int = 3
    quiet: float = 0.65


# --------------------------------------------------------------------------- a cell


def placement(session: CaptureSession, cell: Cell) -> Placement:
    """Place a cell's ops, for its cluster as described."""
    graph, cluster = session.graph, SITES[cell.cluster].cluster
    if cell.split in PARTITIONERS:
        method, costs_by = preset(cell.split)
        options = Options(method, costs_by, cell.schedule, MICRO_BATCHES)
        return make_plan(graph, cluster, source_of(session.facts), options).placement
    concrete = graph.at(graph.batch // MICRO_BATCHES)
    costs = estimator("analytical").estimate(concrete, cluster)
    return placed_as(cell.split, concrete, costs, cluster)


@dataclass(frozen=True)
class Foreseen:
    """The plan to run, and what each forecast of it rests on, by source."""

    plan: Plan
    grounds: Mapping[str, Ground]

    def step_s(self, slower: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the forecasts, in seconds, of processors that are so much slower by now."""
        times = slower or {}
        return {name: g.forecast_s(times.get(name, 1.0)) for name, g in self.grounds.items()}


def foreseen(session: CaptureSession, cell: Cell, place: Place, sitting: Sitting) -> Foreseen:
    """Plan a cell for each source's cluster."""
    where, source = placement(session, cell), source_of(session.facts)

    def planned(cluster: Cluster, by: str) -> tuple[Plan, Costs]:
        options = Options(cell.split, by, cell.schedule, MICRO_BATCHES)
        plan = plan_placed(session.graph, cluster, source, options, where)
        return plan, costs_of(plan)

    there, _ = planned(sitting.cluster, "measured")
    costs = sitting.costs(there)
    plan = with_placement(there, where, costs)
    others = {
        "survey": planned(place.found, "measured"),
        "share": planned(place.shares, "measured"),
        "analytical": planned(place.found, "analytical"),
    }
    return Foreseen(plan, grounds((plan, costs), others))


def measure(place: Place, bench: Bench, cell: Cell, repeats: Repeats, with_memory: bool) -> Row:
    """Forecast a cell, run it, and put both side by side."""
    start_s, session = time.monotonic(), bench.session(cell.model)
    found = foreseen(session, cell, place, place.sit(bench, cell.model))
    plan = found.plan
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        bundle = write_bundle(plan, session, Path(scratch, "bundle"))
        taken = quiet_runs(place.net, bundle, repeats, Path(scratch))
        row = Row(
            cell.model,
            cell.cluster,
            cell.schedule,
            cell.split,
            step_s=[run.step_s for run in taken],
            reference_s=[run.reference_s for run in taken],
            forecast_s=found.step_s(),
            forecast_reference_s=place.forecast_references(cell.model, bench.references()),
            covered=measured_share(plan) or 0.0,
            busy=[round(run.busy, 3) for run in taken],
        )
        row = replace(row, forecast_now_s=found.step_s(row.slower))
        if with_memory:
            row = remembered(row, place.net, plan, bundle, Path(scratch))
    return replace(row, took_s=round(time.monotonic() - start_s, 1))


def remembered(row: Row, net: Network, plan: Plan, bundle: Path, scratch: Path) -> Row:
    """Measure the memory of a cell's bundle.

    Live tensors are tracked on the emulated devices: how many messages are under way at once
    depends on links and speeds. Resident memory is that of processes of this machine's own.
    """
    entries = {entry.device: entry for entry in plan.forecast.devices}
    return replace(
        row,
        forecast_bytes={name: entry.peak_bytes for name, entry in entries.items()},
        tracked_bytes=dict(tracked_bytes(bundle, scratch / "tracked", net.spawn)),
        reserved_bytes={n: needed_bytes(e, plan.cluster.device[n]) for n, e in entries.items()},
        resident_bytes=dict(resident_bytes(bundle, scratch / "resident")),
    )


def forecast_anew(place: Place, bench: Bench, row: Row) -> Row:
    """Forecast a row again, from what was measured before its runs; run nothing."""
    session, cell = bench.session(row.model), row.cell
    found = foreseen(session, cell, place, place.sit(bench, cell.model))
    references = place.forecast_references(cell.model, bench.references())
    row = replace(row, forecast_s=found.step_s(), forecast_reference_s=references)
    return replace(row, forecast_now_s=found.step_s(row.slower))


def memory_anew(place: Place, bench: Bench, row: Row) -> Row:
    """Measure the memory of a row again, and nothing else."""
    session, cell = bench.session(row.model), row.cell
    plan = foreseen(session, cell, place, place.sit(bench, cell.model)).plan
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        bundle = write_bundle(plan, session, Path(scratch, "bundle"))
        return remembered(row, place.net, plan, bundle, Path(scratch))


@dataclass(frozen=True)
class Taken:
    """One run: the steps that count, the reference beside it, how busy the machine was."""

    step_s: Sequence[float]
    reference_s: float
    busy: float


def quiet_runs(net: Network, bundle: Path, repeats: Repeats, scratch: Path) -> Sequence[Taken]:
    """Run so often; again, at most as often, where others used the machine; keep the quietest."""
    taken: list[Taken] = []
    while len(taken) < 2 * repeats.runs:
        taken.append(run_once(net, bundle, repeats.steps, scratch / f"run{len(taken)}"))
        if sum(run.busy <= repeats.quiet for run in taken) == repeats.runs:
            break
    return sorted(taken, key=lambda run: run.busy)[: repeats.runs]


def run_once(net: Network, bundle: Path, steps: int, logs: Path) -> Taken:
    """Run a bundle, with the reference timed beside it."""
    with Reference() as beside:
        run = net.run(bundle, RunOptions(steps=1 + steps, threads=1, logs=logs))
    return Taken([line.step_s for line in run.steps[1:]], beside.seconds, beside.busy)


# --------------------------------------------------------------------------- all cells


def lacking(
    cells: Sequence[Cell], rows: Sequence[Row], again: float | None = None
) -> Sequence[Cell]:
    """Return the cells that have no row yet, or whose repeats differ by more than `again`."""
    most = math.inf if again is None else again
    done = {row.cell for row in rows if (noise_floor([row]) or 0.0) <= most}
    return [cell for cell in cells if cell not in done]


Way = Callable[[Place, Cell], Row]


def in_full(cells: Sequence[Cell], bench: Bench, repeats: Repeats) -> Way:
    """Return how to measure cells: times of all, memory of each n-th."""
    number = {cell: i for i, cell in enumerate(cells)}

    def way(place: Place, cell: Cell) -> Row:
        with_memory = repeats.memory > 0 and number[cell] % repeats.memory == 0
        return measure(place, bench, cell, repeats, with_memory)

    return way


def anew(rows: Sequence[Row], of_row: Callable[[Place, Bench, Row], Row], bench: Bench) -> Way:
    """Return how to make a part of rows anew."""
    known = {row.cell: row for row in rows}
    return lambda place, cell: of_row(place, bench, known[cell])


def measured(
    cells: Sequence[Cell], bench: Bench, quiet: float, say: Say, way: Way
) -> Iterator[Row]:
    """Measure cells cluster by cluster; a cell that fails is said and left out."""
    bench.profile(sorted({cell.model for cell in cells}), say)
    for name, group in groupby(cells, key=lambda cell: cell.cluster):
        with emulated(SITES[name].cluster) as net:
            place = Place.of(net, bench.machine, bench.work / name, quiet)
            say(f"{name}: {place.found.devices}")
            for cell in group:
                try:
                    yield way(place, cell)
                except BigBrainError as error:
                    say(f"{cell} failed: {error}")


@click.command()
@click.option("--out", type=PATH, required=True, help="The file of rows; is added to.")
@click.option("--cells", "count", default=96, show_default=True, help="How many of the product.")
@click.option("--only", multiple=True, help="Of these, those whose name has this text.")
@click.option("--seed", default=0, show_default=True, help="Of the choice of cells.")
@click.option("--runs", default=5, show_default=True, help="Of each cell.")
@click.option("--steps", default=5, show_default=True, help="Of each run, besides its first.")
@click.option("--memory", default=3, show_default=True, help="Track each n-th cell's; 0: none.")
@click.option("--quiet", default=0.65, show_default=True, help="Repeat runs of a busier machine.")
@click.option("--again", type=float, help="Measure cells anew whose repeats differ by more: 0.1.")
@click.option("--memory-again", is_flag=True, help="Measure only memory, of rows that have it.")
@click.option("--forecast-again", is_flag=True, help="Only make the forecasts of rows anew.")
@click.option("--profiles", type=PATH, help="The profile database.  [default: beside --out]")
@click.option("--source", type=click.Choice(SOURCES), help="[default: best on cells marked c]")
@click.option("--write", type=PATH, help="Write a page with every row and a plot.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing: show the rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a row, then the summary.")
def main(
    out: Path,
    count: int,
    only: tuple[str, ...],
    seed: int,
    runs: int,
    steps: int,
    memory: int,
    quiet: float,
    again: float | None,
    memory_again: bool,
    forecast_again: bool,
    profiles: Path | None,
    source: str | None,
    write: Path | None,
    only_report: bool,
    as_json: bool,
) -> None:
    """Measure what lacks, then show every row and what all come to; exit code 5: cells failed."""
    wanted = [c for c in subset(count, seed) if not only or any(t in str(c) for t in only)]
    known = read_rows(out)
    missing = [] if only_report else lacking(wanted, known, again)
    repeats = Repeats(runs, steps, memory, quiet)
    if memory_again or forecast_again:
        of_row = forecast_anew if forecast_again else memory_anew
        some = [r for r in known if r.cell in wanted and (forecast_again or r.tracked_bytes)]
        cells = [cell for cell in wanted if cell in {row.cell for row in some}]
        _measure_into(out, cells, profiles, quiet, partial(anew, some, of_row))
    elif missing:
        _measure_into(out, missing, profiles, quiet, partial(in_full, missing, repeats=repeats))
    rows = read_rows(out)
    if not rows:
        raise click.ClickException(f"no row was measured: {out}")
    source = source or best_source(rows)
    found = summary(rows, source)
    if write is not None:
        write_page(rows, write)
    if as_json:
        facts = [*map(asdict, rows), asdict(found)]
        click.echo("\n".join(map(json.dumps, facts)))
    else:
        lines = (HEADER, *(row_line(row, source) for row in rows), *summary_lines(found))
        click.echo("\n".join(lines))
    sys.exit(5 if not only_report and lacking(wanted, rows) else 0)


def _measure_into(
    out: Path,
    cells: Sequence[Cell],
    profiles: Path | None,
    quiet: float,
    make_way: Callable[[Bench], Way],
) -> None:
    torch.set_num_threads(1)
    load("partitioner")
    load("estimator")
    work = out.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    store = (profiles or work / "profiles.sqlite").resolve()
    os.environ["BIGBRAIN_PROFILES"] = str(store)
    with ExitStack() as stack:
        bench = Bench(work.resolve(), store, stack)
        for row in measured(cells, bench, quiet, _say, make_way(bench)):
            append_row(out, row)
            _say(row_line(row, next(iter(row.forecast_s))))


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


if __name__ == "__main__":
    main()
