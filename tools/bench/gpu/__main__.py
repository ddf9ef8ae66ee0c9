"""Forecast against measured on one GPU: GPT, Llama and ResNet, each at three sizes.

    python -m tools.bench gpu [--sizes small] [--models gpt] [--out rows.jsonl] [--write PAGE]

`doctor` describes the GPU, `profile` measures each model's ops on it, and the plan on the one
device is forecast by `measured`, `analytical` and, where a preset speaks of the card, by its
datasheet. The bundle then runs as its users run it. Without a GPU it says so, and measures nothing.
`--device cpu` makes the same table of this host's CPU. Rows that --out has are not measured again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import click
import torch

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import Run, RunOptions, run
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.costs.profiles import Machine, ProfileStore
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.measure.host import probe
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.plan import Options, Plan, make_plan, measured_share
from tools.bench.gpu.card import (
    Card,
    Kind,
    as_profiled,
    blas_bytes,
    by_datasheet,
    card,
    lacking,
    products_use_tf32,
    rates,
    sheet_rates,
)
from tools.bench.gpu.models import MODELS, NAMES, SIZES, TINY, Model
from tools.bench.gpu.ops import op_table
from tools.bench.gpu.report import report, summary, write_page
from tools.bench.gpu.rows import Row, append_row, read_rows
from tools.conformance.live_bytes import tracked_bytes

PATH = click.Path(path_type=Path)
WARM_UP = 3
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Place:
    """Place of measurements: the device, the profile database, the duration, and a folder."""

    kind: Kind
    card: Card
    cluster: Cluster
    store: Path
    steps: int
    work: Path


# --------------------------------------------------------------------------- one model


def measure(place: Place, model: Model) -> Row:
    """Profile a model, forecast it, run it, and put all side by side."""
    path = place.work / f"{model.name}_{model.size}.py"
    path.write_text(model.text())
    options = ProfileOptions(rows=(model.micro_rows,), device=place.kind)
    profiled = profile(path, place.store, options)
    machine = machine_of(place.store, profiled.machine)
    with capture_file(path) as session:
        plans = planned(place, model, session, machine)
        bundle = write_bundle(plans["measured"], session, place.work / path.stem, force=True)
    done = ran(place, bundle)
    return row(place, model, machine, plans, done, peak_bytes(place, bundle, done))


def machine_of(store: Path, key: str) -> Machine:
    """Return a machine of the database by its key."""
    found = {machine.key: machine for machine in ProfileStore(store, read_only=True).machines()}
    return found[key]


def planned(
    place: Place, model: Model, session: CaptureSession, machine: Machine
) -> Mapping[str, Plan]:
    """Plan a model on the one device, by each forecast's name.

    The ops were profiled on the very device: their times are not scaled by doctor's rates of it.
    """

    def plan(estimator: str, cluster: Cluster) -> Plan:
        options = Options("naive", estimator, micro_batches=model.micro_batches)
        return make_plan(session.graph, cluster, source_of(session.facts), options)

    plans = {
        "measured": plan("measured", as_profiled(place.cluster, machine)),
        "analytical": plan("analytical", place.cluster),
    }
    if place.card.sheet is not None:
        plans["preset"] = plan("analytical", by_datasheet(place.cluster, place.card.sheet))
    return plans


def ran(place: Place, bundle: Path) -> Run:
    """Run a bundle as a process of its own."""
    logs = place.work / f"{bundle.name}.logs"
    options = RunOptions(steps=WARM_UP + place.steps, logs=logs, deadline_s=DEADLINE_S)
    return run(bundle, options)


def peak_bytes(place: Place, bundle: Path, done: Run) -> int:
    """Return the most that tensors took; on a CPU a run of its own counts them."""
    if place.kind == "cpu":
        found = tracked_bytes(bundle, place.work / f"{bundle.name}.tracked")
    else:
        found = done.max_allocated_bytes
    (nbytes,) = found.values()
    return nbytes


def row(
    place: Place,
    model: Model,
    machine: Machine,
    plans: Mapping[str, Plan],
    done: Run,
    measured_bytes: int,
) -> Row:
    """Put what was forecast beside what was measured."""
    plan = plans["measured"]
    (device,), (entry,) = place.cluster.devices, plan.forecast.devices
    return Row(
        model=model.name,
        size=model.size,
        card=place.card.name,
        kind=place.kind,
        torch=torch.__version__,
        date=date.today().isoformat(),
        rows=model.rows,
        micro_batches=model.micro_batches,
        step_s=[line.step_s for line in done.steps[WARM_UP:]],
        forecast_s={name: each.forecast.step_s for name, each in plans.items()},
        covered=measured_share(plan) or 0.0,
        forecast_bytes=entry.peak_bytes,
        measured_bytes=measured_bytes,
        doctor=rates(device),
        preset=place.card.preset,
        datasheet=sheet_rates(place.card.sheet),
        ops=op_table(plans["analytical"], machine),
        blas_bytes=blas_bytes(place.kind),
        profiled_launch_s=machine.launch_s,
        products_use_tf32=products_use_tf32(place.kind),
    )


# --------------------------------------------------------------------------- all of them


def measured(place: Place, models: Sequence[Model]) -> Iterator[Row]:
    """Measure models one by one; one that fails, out of memory, say, is said and left out."""
    for model in models:
        try:
            yield measure(place, model)
        except (BigBrainError, RuntimeError) as error:  # the latter: of a profiling process
            _say(f"{model.name} {model.size} failed: {error}")


def _wanted(names: str, sizes: str) -> Sequence[Model]:
    asked = [(n, s) for n in _some(names, NAMES) for s in _some(sizes, (*SIZES, TINY))]
    return [MODELS[key] for key in asked]


def _some(text: str, known: Sequence[str]) -> Sequence[str]:
    found = [word.strip() for word in text.split(",")]
    unknown = [word for word in found if word not in known]
    if unknown:
        raise click.UsageError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return found


@click.command()
@click.option("--sizes", default=",".join(SIZES), show_default=True)
@click.option("--models", default=",".join(NAMES), show_default=True)
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True)
@click.option("--steps", default=20, show_default=True, help=f"After {WARM_UP} that do not count.")
@click.option("--db", type=PATH, help="The profile database.  [default: beside --out]")
@click.option("--cluster", type=PATH, help="Of one device, instead of asking doctor.")
@click.option("--out", type=PATH, help="The file of rows; is added to.")
@click.option("--write", type=PATH, help="Write a page with all tables.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing: show the rows of --out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a row, then the summary.")
def main(
    sizes: str,
    models: str,
    device: Kind,
    steps: int,
    db: Path | None,
    cluster: Path | None,
    out: Path | None,
    write: Path | None,
    only_report: bool,
    as_json: bool,
) -> None:
    """Measure what lacks, then show every row and what all come to; exit code 5: some failed."""
    wanted = _wanted(models, sizes)
    why = None if only_report else lacking(device)
    if why is not None:
        click.echo(json.dumps({"skipped": why}) if as_json else why)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        path = out or Path(scratch, "rows.jsonl")
        left = 0 if only_report else _measure_into(path, wanted, device, steps, db, cluster)
        rows = read_rows(path)
    if not rows:
        raise click.ClickException(f"no row was measured: {path}")
    if write is not None:
        write_page(rows, write)
    if as_json:
        facts = [*map(asdict, rows), asdict(summary(rows))]
        click.echo("\n".join(map(json.dumps, facts)))
    else:
        click.echo("\n".join(report(rows)))
    sys.exit(5 if left else 0)


def _measure_into(
    out: Path,
    wanted: Sequence[Model],
    kind: Kind,
    steps: int,
    db: Path | None,
    cluster: Path | None,
) -> int:
    """Measure the models that have no row yet; return how many have none after that."""
    found = card(kind)
    done = {row.key for row in read_rows(out)}
    keys = {model: (model.name, model.size, found.name, torch.__version__) for model in wanted}
    missing = [model for model in wanted if keys[model] not in done]
    if not missing:
        return 0
    work = out.with_suffix(".work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    store = (db or work / "profiles.sqlite").resolve()
    os.environ["BIGBRAIN_PROFILES"] = str(store)
    place = Place(kind, found, _one_device(kind, cluster), store, steps, work)
    _say(f"{found.name}: {place.cluster.devices[0]}")
    for each in measured(place, missing):
        append_row(out, each)
        done.add(each.key)
        _say(f"{each.model} {each.size}: {each.measured_s:.4f} s, {each.measured_bytes} bytes")
    return len(missing) - sum(keys[model] in done for model in missing)


def _one_device(kind: Kind, path: Path | None) -> Cluster:
    found = probe(devices=1, kind=kind).cluster if path is None else read_cluster(path)
    if [device.kind for device in found.devices] != [kind]:
        raise InputError(
            f"expected a cluster of one {kind} device, found {len(found.devices)} of "
            f"{', '.join(sorted({device.kind for device in found.devices}))}",
            at=str(path),
            help=f"bigbrain-fx doctor --devices 1 --kind {kind} writes one",
        )
    return replace(found, hosts=())  # one device has for itself what several would share


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


if __name__ == "__main__":
    main()
