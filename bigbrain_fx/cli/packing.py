"""Command: pack."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import COUNT, PATH, POSITIVE, json_option, option
from bigbrain_fx.cli.output import json_line
from bigbrain_fx.cli.progress import working

if TYPE_CHECKING:
    from bigbrain_fx.plan import PackedJob, Packing


@cli.command(short_help="Several jobs on one cluster: who gets which devices?")
@click.argument("jobs", nargs=-1, required=True)
@option("-d", "--devices", type=PATH, required=True, help="The cluster.json to divide.")
@option(
    "--steps",
    type=COUNT,
    multiple=True,
    default=(1000,),
    help="Of each job, in their order; or one number for all.",
)
@option(
    "--effort",
    type=click.Choice(["fast", "normal", "high"]),
    default="fast",
    help="How long to look at each part: see --partitioner auto.",
)
@option("--estimator", default="analytical", help="Of model files.")
@option("-o", "--out", type=PATH, help="Write a cluster file for each job to this folder.")
@option("--force", is_flag=True, help="Replace files that are there.")
@option("--time-limit", type=POSITIVE, default=600.0, help="Of a capture.")
@json_option
def pack(
    jobs: tuple[str, ...],
    devices: Path,
    steps: tuple[int, ...],
    effort: str,
    estimator: str,
    out: Path | None,
    force: bool,
    time_limit: float,
    as_json: bool,
) -> None:
    """Divide devices among JOBS, and say whether that beats running them one after the other.

    JOBS are bundles, or model files as `estimate` takes them (run as code). Each gets devices of
    its own, so that the last one ends as early as can be; forecasts, nothing is run.
    """
    from bigbrain_fx import bundles
    from bigbrain_fx.plan import Options

    options = Options(estimator=estimator, effort=effort)  # type: ignore[arg-type]  # click has checked it
    if out is not None and not force:
        bundles.require_free_parts(jobs, out)
    with working(f"dividing {devices} among {len(jobs)} jobs"):
        found = bundles.pack(jobs, devices, steps, options, time_limit_s=time_limit)
    written = bundles.write_parts(found, devices, out) if out is not None else {}
    if as_json:
        click.echo(json_line(_fields(found)))
        return
    show_packing(found)
    for job, (name, path) in zip(jobs, written.items(), strict=True):
        click.echo(f"wrote {path}; {name}: {split_command(job, name, path)}", err=True)


def split_command(job: str, name: str, devices: Path) -> str:
    """Return what to type to split a job for its devices."""
    from bigbrain_fx.plan import read_plan

    path = Path(job)
    is_bundle = path.name == "plan.json" or (path / "plan.json").is_file()
    model = (is_bundle and read_plan(path).source.path) or job
    words = ["bigbrain-fx", "split", model, "--devices", str(devices), "--partitioner", "auto"]
    return shlex.join([*words, "--out", str(devices.with_name(f"{name}-bundle"))])


def show_packing(found: Packing) -> None:
    """Print a row for each job, then the verdict: together against one by one."""
    from bigbrain_fx.cli.console import show_table

    show_table(
        ("job", "devices", "step s", "steps", "ends after s", "alone s"), map(_row, found.jobs)
    )
    click.echo("\n".join(_verdict(found)))


def _row(job: PackedJob) -> tuple[str, ...]:
    times = f"{job.ends_s:.4g}", f"{job.alone_s:.4g}"
    return (
        job.name,
        " ".join(_names(job)),
        f"{job.plan.forecast.step_s:.4g}",
        str(job.steps),
        *times,
    )


def _names(job: PackedJob) -> Sequence[str]:
    """Return the devices that are used; of those that a job was given it may leave some idle."""
    return job.plan.stages.devices


def _verdict(found: Packing) -> list[str]:
    gain = found.in_turn_last_s / found.last_s
    better = "together ends" if gain >= 1 else "one after the other ends"
    looked = (
        "the only division was looked at"
        if found.is_exact and found.looked_at == 1
        else f"all {found.looked_at} divisions were looked at"
        if found.is_exact
        else f"{found.looked_at} divisions were looked at, not all"
    )
    return [
        f"together: the last ends after {found.last_s:.4g} s, on average {found.mean_s:.4g} s",
        f"one after the other, the shortest first: {found.in_turn_last_s:.4g} s, on average "
        f"{found.in_turn_mean_s:.4g} s",
        f"{better} {max(gain, 1 / gain):.2f} times sooner; {looked}; no division or order ends "
        f"before {found.bound_s:.4g} s",
    ]


def _fields(found: Packing) -> dict[str, object]:
    jobs = [
        {
            "name": job.name,
            "devices": list(_names(job)),
            "steps": job.steps,
            "step_s": job.plan.forecast.step_s,
            "ends_s": job.ends_s,
            "alone_s": job.alone_s,
        }
        for job in found.jobs
    ]
    return {
        "jobs": jobs,
        "together": {"last_s": found.last_s, "mean_s": found.mean_s},
        "in_turn": {"last_s": found.in_turn_last_s, "mean_s": found.in_turn_mean_s},
        "bound_s": found.bound_s,
        "is_exact": found.is_exact,
        "looked_at": found.looked_at,
    }
