"""Naive against analytical against `auto`, the founders' hypothesis: measured rows, and a page.

    python -m tools.studies.naive_vs_analytical --out rows.jsonl --write results.md

Linux and root, as `tools.studies.emulation`. Seven models, a CNN at three batch sizes among them,
on four emulated clusters, each planned by all three as `split` does with nothing else said. A run
that was stopped goes on.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import torch

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import RunOptions
from bigbrain_fx.core import Cluster
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.planning.registry import load, preset
from tools.bench.json_lines import read_lines
from tools.studies.emulated_models import CNN, MODELS, Model, Site
from tools.studies.emulation import Network, emulated, missing

PATH = click.Path(path_type=Path)
ROOT = Path(__file__).resolve().parents[3]
PLANNERS = ("naive", "analytical", "auto")
SITES = tuple(
    Site(f"{':'.join(map(str, speeds))} at {rate:g} Mbit/s", speeds, rate)
    for speeds, rate in product(((2, 1), (4, 2, 1, 1)), (1000.0, 100.0))
)
CNN_ROWS = (16, 64, 256)
STEPS = 6  # of a run; the first is not counted


def studied() -> Mapping[str, Model]:
    """Return the models by name; the CNN, 64 wide, once for each batch size."""
    found = {name: MODELS[name] for name in ("gpt", "llama", "encdec", "moe", "resnet", "unet")}
    cnn = replace(CNN, built="Cnn(64)")
    for rows in CNN_ROWS:
        batch = cnn.batch.format(rows=rows)
        found[f"cnn, {rows} rows"] = replace(cnn, name="cnn", rows=rows, batch=batch)
    return found


@dataclass(frozen=True)
class Measured:
    """One plan, run.

    Attributes:
        step_s: of each step but the first.
        forecast_s: of a step, on the cluster as surveyed.
        peak_bytes: of tensors on the fullest device, as forecast.
        resident_bytes: of the fullest process, above what Python and torch take.
        devices: in use.
        load: of the machine, others included, when it began.
    """

    model: str
    cluster: str
    planner: str
    rows: int
    micro_batches: int
    devices: int
    schedule: str
    step_s: tuple[float, ...]
    forecast_s: float
    peak_bytes: int
    resident_bytes: int
    load: float

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is of."""
        return self.model, self.cluster, self.planner

    @property
    def median_s(self) -> float:
        """Seconds of the middle step."""
        return statistics.median(self.step_s)

    @property
    def rows_per_s(self) -> float:
        """Rows trained on in a second."""
        return self.rows / self.median_s


def row_of(found: dict[str, Any]) -> Measured:
    """Return what a line of the file says."""
    return Measured(**{**found, "step_s": tuple(found["step_s"])})


# --------------------------------------------------------------------------- measuring


def lacking(
    done: set[tuple[str, str, str]], only: Sequence[str], sites: Sequence[Site], turns: int
) -> Iterator[Measured]:
    """Measure what is not there, cluster by cluster and model by model."""
    wanted = [
        (site, name, planner)
        for site, name, planner in product(sites, only, PLANNERS)
        if (name, site.name, planner) not in done
    ]
    for site, of_site in groupby(wanted, key=lambda each: each[0]):
        with emulated(site.cluster) as net:
            cluster = net.survey().cluster
            for name, alike in groupby(of_site, key=lambda each: each[1]):
                planners = [each[2] for each in alike]
                yield from _of_model(net, cluster, site, name, planners, turns)


def _of_model(
    net: Network, cluster: Cluster, site: Site, name: str, planners: Sequence[str], turns: int
) -> Iterator[Measured]:
    """Run the plans of a model in turns: a busy machine changes from minute to minute."""
    model = studied()[name]
    with tempfile.TemporaryDirectory(prefix="naive-vs-") as folder:
        path = Path(folder, f"{model.name}.py")
        path.write_text(model.text(str(ROOT)))
        with capture_file(path) as session:
            plans = [planned(session, cluster, planner) for planner in planners]
            bundles = [
                write_bundle(plan, session, Path(folder, planner))
                for planner, plan in zip(planners, plans, strict=True)
            ]
        taken: list[list[Measured]] = [[] for _ in planners]
        for turn, number in product(range(turns), range(len(planners))):
            key, logs = (name, site.name, planners[number]), Path(folder, f"logs-{turn}-{number}")
            taken[number].append(_run(net, bundles[number], logs, plans[number], key))
    yield from map(_together, taken)


def _together(runs: Sequence[Measured]) -> Measured:
    """Return the runs of one plan as one: all their steps, and the fullest process."""
    return replace(
        runs[0],
        step_s=tuple(step_s for run in runs for step_s in run.step_s),
        resident_bytes=max(run.resident_bytes for run in runs),
    )


def planned(session: CaptureSession, cluster: Cluster, planner: str) -> Plan:
    """Plan as `split --partitioner` does with nothing else said."""
    partitioner, estimator = preset(planner)
    options = Options(partitioner, estimator)
    return make_plan(session.graph, cluster, source_of(session.facts), options)


def _run(net: Network, bundle: Path, logs: Path, plan: Plan, key: tuple[str, str, str]) -> Measured:
    load_before = os.getloadavg()[0]
    done = net.run(bundle, RunOptions(steps=STEPS, threads=1, logs=logs))
    return Measured(
        *key,
        plan.graph.batch,
        plan.micro_batches,
        len(plan.stages.devices),
        plan.schedule,
        tuple(line.step_s for line in done.steps[1:]),
        plan.forecast.step_s,
        max(device.peak_bytes for device in plan.forecast.devices),
        max(done.max_rss_bytes.values()) - net.baseline_rss_bytes,
        load_before,
    )


# --------------------------------------------------------------------------- the page

_HEAD = (
    "# Naive against analytical against auto",
    "",
    "The founders' hypothesis: an estimator that knows the devices gives a split that trains more "
    "rows a second than an",
    "equal one. Written by",
    "",
    "```",
    "python -m tools.studies.naive_vs_analytical --out rows.jsonl --write results.md",
    "```",
    "",
    "Each cluster is emulated (a network namespace, processor quota and link for each device) and "
    "surveyed as `doctor` does;",
    "each plan is what `split --partitioner` gives with nothing else said, micro-batches left "
    "open, run for six steps. Rows a",
    "second are of the middle of five steps, with the least and the most beside it. **MiB**: of "
    "tensors on the fullest device,",
    "as forecast, and by how much its process grew beyond Python and torch.",
)


def page(rows: Sequence[Measured]) -> str:
    """Return the page."""
    by_key = {row.key: row for row in rows}
    lines = [*_HEAD, "", _said(rows), "", *_summary(by_key)]
    for site in SITES:
        lines += ["", f"## {site.name}", "", *_table(site.name, by_key)]
    return "\n".join(lines) + "\n"


def _said(rows: Sequence[Measured]) -> str:
    count = len(SITES) * len(studied()) * len(PLANNERS)
    if not rows:
        return f"0 of {count} runs are here."
    loads = sorted(row.load for row in rows)
    return (
        f"{len(rows)} of {count} runs are here. The machine's load when a run began (the run "
        f"before it among it) was {loads[0]:.1f} to {loads[-1]:.1f}, median "
        f"{loads[len(loads) // 2]:.1f}, on two cores."
    )


def _summary(rows: Mapping[tuple[str, str, str], Measured]) -> Iterator[str]:
    """Yield how many times faster each is than another, over all cases."""
    yield "| times as fast | cases | least | median | most | as forecast, median |"
    yield "|---|---:|---:|---:|---:|---:|"
    for over, under in (("analytical", "naive"), ("auto", "naive"), ("auto", "analytical")):
        pairs = [
            (rows[(*case, over)], rows[(*case, under)])
            for case in product(studied(), (site.name for site in SITES))
            if (*case, over) in rows and (*case, under) in rows
        ]
        if pairs:
            found = sorted(b.median_s / a.median_s for a, b in pairs)
            said = statistics.median(b.forecast_s / a.forecast_s for a, b in pairs)
            figures = (found[0], statistics.median(found), found[-1], said)
            shown = " | ".join(f"{each:.2f}" for each in figures)
            yield f"| {over} against {under} | {len(pairs)} | {shown} |"


def _table(site: str, rows: Mapping[tuple[str, str, str], Measured]) -> Iterator[str]:
    yield (
        "| model | planner | devices | schedule | rows/s (least, most) | times naive | forecast "
        "off | MiB, forecast | grew |"
    )
    yield "|---|---|---:|---|---:|---:|---:|---:|---:|"
    for name in studied():
        naive = rows.get((name, site, "naive"))
        for planner in PLANNERS:
            row = rows.get((name, site, planner))
            if row is not None:
                yield _line(row, naive)


def _line(row: Measured, naive: Measured | None) -> str:
    least, most = row.rows / max(row.step_s), row.rows / min(row.step_s)
    times = f"{naive.median_s / row.median_s:.2f}" if naive else ""
    return (
        f"| {row.model} | {row.planner} | {row.devices} | {row.schedule}, {row.micro_batches} | "
        f"{row.rows_per_s:.1f} ({least:.1f}, {most:.1f}) | {times} | "
        f"{row.forecast_s / row.median_s - 1:+.0%} | {row.peak_bytes / 2**20:.0f} | "
        f"{row.resident_bytes / 2**20:.0f} |"
    )


@click.command(help=__doc__)
@click.option("--out", type=PATH, required=True, help="The file of rows; is added to.")
@click.option("--only", multiple=True, type=click.Choice([*studied()]))
@click.option("--at", multiple=True, type=click.Choice([site.name for site in SITES]))
@click.option("--turns", default=1, show_default=True, help="Runs of each plan, in turns.")
@click.option("--write", type=PATH, help="The page.")
@click.option("--rows-only", is_flag=True, help="Measure nothing: write the page of what is there.")
def main(
    out: Path,
    only: tuple[str, ...],
    at: tuple[str, ...],
    turns: int,
    write: Path | None,
    rows_only: bool,
) -> None:
    """Measure what lacks; write the page."""
    sites = [site for site in SITES if not at or site.name in at]
    torch.set_num_threads(1)
    load("partitioner")
    load("estimator")
    rows = read_lines(out, "tools.studies.naive_vs_analytical", row_of)
    if not rows_only:
        if reason := missing():
            raise click.ClickException(reason)
        for row in lacking({row.key for row in rows}, only or [*studied()], sites, turns):
            with out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            rows.append(row)
            click.echo(f"{time.strftime('%H:%M:%S')} {row}", err=True)
    if write is not None:
        write.write_text(page(rows))


if __name__ == "__main__":
    main()
