"""Commands: run, verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigbrain_fx.cli.background import start_aside
from bigbrain_fx.cli.failing import read_duration
from bigbrain_fx.cli.group import all_is_done, cli
from bigbrain_fx.cli.options import COUNT, PATH, POSITIVE, bundle_argument, json_option
from bigbrain_fx.cli.progress import stepping, working
from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from bigbrain_fx.bundles import Line, Run, RunOptions, Validation
    from bigbrain_fx.plan import Plan
    from bigbrain_fx.supervisor import Event


_SEVERAL = "for several hosts: copy the bundle to each, run there (or add --local)"
_OF_COMMITS = {
    "resume": ": where to go on from",
    "keep": ": whose commits to keep",
}
_COLLECTIVE = (
    "torch's collectives sum the gradients: no process that dies is replaced, and the run ends; "
    "--commits FOLDER keeps the training's state, and --resume goes on from there"
)
_SECRET = "with a file `secret` in it, the same on all hosts and only yours to read: "


@cli.command(short_help="Run a bundle, a process per device.")
@bundle_argument
@click.option(
    "--steps",
    type=COUNT,
    help="Training steps, or batches of inference [default: 10, or all rows of --inputs].",
)
@click.option("--seed", type=int, help="Seed of data and dropout [default: the plan's].")
@click.option("--port", default=0, help="Rendezvous port; 0 takes any free one.")
@click.option("--save", type=PATH, help="Write the trained tensors to this folder.")
@click.option("--inputs", type=PATH, help="Infer these rows: a safetensors file of input tensors.")
@click.option("--outputs", type=PATH, help="Write the outputs of each batch to this folder.")
@click.option(
    "--logs",
    type=PATH,
    help="Keep the processes' logs here [default: BUNDLE/runs, of the last five runs].",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=POSITIVE,
    help="Longest wait for a message, in seconds [default: 300; 1800 where stages are compiled].",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    help="Keep so many processes warm, to replace those of a training that die [default: 1].",
)
@click.option("--no-replay", is_flag=True, help="Replace no process: one death ends the run.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=20,
    help="Processes that may be replaced within ten minutes.",
)
@click.option(
    "--hang",
    "hang_s",
    type=POSITIVE,
    default=60.0,
    help="End a process that makes no progress for so many seconds; time in which a busy host gave "
    "it no processor does not count.",
)
@click.option(
    "--grace",
    "grace_s",
    type=POSITIVE,
    help="When asked to stop, wait so many seconds for the end of a step, and for the last commit "
    "[default: 3 times the longest recent step, at least --hang and 30].",
)
@click.option(
    "--snapshot-every", type=COUNT, help="Steps between snapshots in memory [default: measured]."
)
@click.option(
    "--snapshots",
    type=PATH,
    help="Keep snapshots in this folder of a disk [default: in memory, or with the stores of a "
    "bundle whose state lies there].",
)
@click.option(
    "--suspect",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="RATE",
    help="Let a spare compute this share of all devices' steps again, and go back where it finds "
    "another result.",
)
@click.option(
    "--log-mib",
    type=click.IntRange(min=0),
    help="Memory for sent messages on each device [default: a share of half of what is free].",
)
@click.option(
    "--on-nan",
    type=click.Choice(["stop", "skip", "ignore"]),
    help="At a loss or gradient that is not finite: stop, skip the update on all devices, or "
    "ignore it [default: stop].",
)
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    help="What carries messages between GPUs. gloo: through host memory, and a process that dies "
    "is replaced. nccl: directly, and none is  [default: nccl where all devices are GPUs].",
)
@click.option(
    "--store",
    type=PATH,
    help="A folder for what the bundle offloads [default: those of the cluster file's stores].",
)
@click.option("--elastic", is_flag=True, help="Go on without a device whose processes keep dying.")
@click.option("--commits", type=PATH, help="Write the training's state to this folder.")
@click.option(
    "--commit-every", type=click.IntRange(min=0), help="Steps between commits; 0: first and last."
)
@click.option(
    "--keep",
    type=click.IntRange(min=2),
    help="How many commits stay in --commits [default: 2, or as before].",
)
@click.option(
    "--mtbf",
    metavar="DURATION",
    help='Choose both intervals for this mean time between failures of the job, as "4h".',
)
@click.option("--resume", is_flag=True, help="Go on from the last commit in --commits.")
@click.option(
    "--trace",
    type=PATH,
    metavar="FILE",
    help="Write what every device did beside its forecast to this file, for Perfetto.",
)
@click.option("--events", type=PATH, help="Append what happens to this file, as JSON lines.")
@click.option(
    "--log-every",
    type=COUNT,
    help="Print one step (or batch) in so many, the first and the last [default: each; of more "
    "than 20 steps one in 10, but all of --json].",
)
@click.option(
    "--log-to",
    type=PATH,
    multiple=True,
    metavar="PATH",
    help="Write loss, seconds and rows a second of every step to name.csv; may be given several "
    "times.",
)
@click.option(
    "--validate",
    type=PATH,
    metavar="FILE.py",
    help="After commits run `python FILE.py model.safetensors STEP` aside; its last line, a number "
    "or a JSON object of numbers, is printed.",
)
@click.option(
    "--metrics",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Answer Prometheus on this port of the loopback interface.",
)
@click.option(
    "--background",
    is_flag=True,
    help="Start the run and return; `status BUNDLE` says how far it is.",
)
@click.option("--local", is_flag=True, help="Run all devices here, whatever hosts the plan names.")
@json_option
def run(
    bundle: Path,
    local: bool,
    no_replay: bool,
    mtbf: str | None,
    elastic: bool,
    log_every: int | None,
    validate: Path | None,
    background: bool,
    as_json: bool,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Run BUNDLE on this host, a process per device; for several hosts, print their commands.

    It trains, or infers, as it was split for. A training process that dies is replaced: the others
    wait for it, and the result is the same. SIGTERM ends a training after its step.
    """
    from bigbrain_fx.bundles import (
        RunOptions,
        can_supervise,
        hosts,
        is_lean,
        require_not_lean,
        validations,
    )
    from bigbrain_fx.plan import read_plan

    plan = read_plan(bundle)
    _require_together(choices, elastic)
    if choices["spares"] is not None:
        require_not_lean(bundle)
    if not no_replay and can_supervise(plan, choices["backend"]) and not is_lean(bundle):
        choices["spares"] = 1 if choices["spares"] is None else choices["spares"]
    if mtbf is not None:
        choices |= intervals(plan, mtbf, {**choices, "elastic": elastic})
    if plan.stages.by_backend:
        click.echo(_COLLECTIVE, err=True)
    options = RunOptions(**choices | ({"spares": None} if no_replay else {}))
    if len(hosts(plan)) > 1 and not local:
        beside = {
            "--elastic": elastic,
            "--log-to": options.log_to,
            "--trace": options.trace,
            "--background": background,
            "--metrics": options.metrics,
            "--validate": validate,
            "--log-every": (log_every or 1) > 1,
        }
        _require_one_host(beside)
        _print_commands(plan, bundle, options, as_json)
    elif background:
        start_aside(bundle, options.logs, as_json)
    else:
        told = partial(_tell_validation, as_json)
        with validations(bundle, validate, options.commits, told) as hear:
            done = _run_here(bundle, options, elastic, as_json, log_every, hear)
        with all_is_done():
            _print_done(plan, done, as_json)


def _require_together(choices: Mapping[str, Any], elastic: bool) -> None:
    """Refuse options without the one that they are for."""
    if choices["commits"] is None:
        for flag, what in _OF_COMMITS.items():
            if choices[flag] not in (None, False):
                raise InputError(f"--{flag} needs --commits FOLDER{what}", code="BX3522")
    if choices["trace"] is not None and elastic:
        raise InputError("--trace is of one plan, and --elastic may make others", code="BX3523")


def _print_commands(plan: Plan, bundle: Path, options: RunOptions, as_json: bool) -> None:
    """Say what to type on each host."""
    from bigbrain_fx.bundles import commands, secret_command
    from bigbrain_fx.cli.console import json_line

    typed = commands(plan, options, bundle)
    click.echo(_SEVERAL, err=True)
    if options.spares is not None:
        click.echo(_SECRET + secret_command(), err=True)
    for host, command in typed:
        entry = json_line({"host": host, "command": command})
        click.echo(entry if as_json else f"{host}$ {command}")


def _run_here(
    bundle: Path,
    options: RunOptions,
    elastic: bool,
    as_json: bool,
    log_every: int | None,
    hear: Callable[[Line], None],
) -> Run:
    """Run all devices on this host; print each step, and what happens to processes."""
    from bigbrain_fx.bundles import DEFAULT_STEPS, run as run_bundle, run_elastic

    total = options.steps or (None if options.inputs else DEFAULT_STEPS)
    with stepping(total, as_json, log_every) as shown:

        def show(line: Line) -> None:
            shown(line)
            hear(line)

        if elastic:
            return run_elastic(bundle, options, show, _tell)
        tell = _tell if options.spares is not None else None  # one death is the error itself
        return run_bundle(bundle, options, show, show, on_event=tell)


def _print_done(plan: Plan, done: Run, as_json: bool) -> None:
    """Print what a run came to."""
    from bigbrain_fx.cli.console import pace_text
    from bigbrain_fx.cli.templates import MADE_UP, is_made_up

    if done.stopped_at is not None:
        click.echo(f"stopped before step {done.stopped_at}, as asked", err=True)
    if as_json:
        return
    if done.steps:
        click.echo(f"loss {done.steps[0].loss:.4f} -> {done.steps[-1].loss:.4f}")
    elif plan.mode == "train" and done.stopped_at is None:
        click.echo("no step was left to run: --steps counts those before the commit, too")
    if done.batches:
        rows, total_s = sum(b.rows for b in done.batches), sum(b.batch_s for b in done.batches)
        click.echo(f"{rows} rows in {total_s:.3f} s: {rows / total_s:.1f} rows a second")
    if done.median_s:
        click.echo(pace_text(plan, done.median_s))
        if is_made_up(plan.cluster):
            click.echo(MADE_UP, err=True)
    if done.max_allocated_bytes:
        click.echo(f"tensors on the GPU, at most: {_sizes(done.max_allocated_bytes)}")
    held = f"resident memory {_sizes(done.max_rss_bytes)}; " if done.max_rss_bytes else ""
    click.echo(f"{held}logs in {done.logs}")


def _require_one_host(given: Mapping[str, object]) -> None:
    """Refuse what only a run that starts here can do."""
    for flag in (flag for flag, value in given.items() if value):
        raise InputError(
            f"{flag} is for a run on one host, and this plan has several",
            code="BX3524",
            help="leave it out, or add --local to run all of it here; "
            "`launch.py --json` on the first host prints each step",
        )


def _tell_validation(as_json: bool, found: Validation) -> None:
    from bigbrain_fx.cli.console import json_line

    if as_json and not found.failure:
        click.echo(json_line({"validated": found.step, **found.values}))
    else:
        click.echo(str(found), err=as_json or bool(found.failure))


def _sizes(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in found.items())


def intervals(plan: Plan, mtbf: str, choices: dict[str, Any]) -> dict[str, Any]:
    """Choose what was not given: steps between snapshots and, where they are wanted, commits."""
    from bigbrain_fx.plan import Assumptions, choose

    if plan.mode != "train":
        raise InputError(
            "--mtbf is for training", code="BX3525", help="inference has no state to recover"
        )
    found = choose(plan, Assumptions(read_duration(mtbf, "--mtbf")))
    commit_every = found.commit_every if choices["commits"] is not None else None
    # of a dead device's state a peer has a copy: no snapshots, unless the run may leave one behind
    copies = plan.stages.have_peers and not choices.get("elastic")
    every = None if copies else found.devices[0].snapshot_every
    wanted = {"snapshot_every": every, "commit_every": commit_every}
    return {name: value for name, value in wanted.items() if choices[name] is None}


def _tell(event: Event) -> None:
    from bigbrain_fx.supervisor import status

    line = status(event)
    if line is not None:
        click.echo(line, err=True)


@cli.command(short_help="Check a bundle against the unsplit model.")
@bundle_argument
@click.option(
    "--steps", type=COUNT, default=5, help="Training steps, or batches of inference, to compare."
)
@click.option("--model", help="The model file, if it is not where it was.")
@click.option("--processes", is_flag=True, help="Run it as processes over gloo, not in one.")
@json_option
def verify(bundle: Path, steps: int, model: str | None, processes: bool, as_json: bool) -> None:
    """Check that BUNDLE computes what the unsplit model computes."""
    from bigbrain_fx.bundles import verify as verify_bundle
    from bigbrain_fx.cli.console import json_line, show_verification

    with working(f"verifying {bundle}"):
        found = verify_bundle(bundle, steps=steps, model=model, processes=processes)
    if as_json:
        click.echo(json_line({**dataclasses.asdict(found), "passed": found.passed}))
    else:
        show_verification(found)
    found.require_passed()
