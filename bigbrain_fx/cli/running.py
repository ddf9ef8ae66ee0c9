"""Commands: run, verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigbrain_fx.cli.background import start_aside
from bigbrain_fx.cli.command import grouped
from bigbrain_fx.cli.failure_options import read_duration
from bigbrain_fx.cli.group import all_is_done, cli
from bigbrain_fx.cli.options import (
    COUNT,
    PATH,
    POSITIVE,
    Add,
    bundle_argument,
    checkpoint_option,
    json_option,
    option,
)
from bigbrain_fx.cli.output import emit, json_line
from bigbrain_fx.cli.progress import stepping, working
from bigbrain_fx.errors import InputError
from bigbrain_fx.supervisor import FLAGS, MORE_FLAGS, Flag

if TYPE_CHECKING:
    from bigbrain_fx.bundles import Line, Run, RunOptions, Validation
    from bigbrain_fx.plan import Plan
    from bigbrain_fx.supervisor import Event


_SEVERAL = "several hosts: copy the bundle to each and run its command there, or add --local"
_OF_COMMITS = {
    "resume": ": where to resume from",
    "keep": ": whose checkpoints to retain",
}
_COLLECTIVE = (
    "torch's collectives sum the gradients: no process that dies is replaced, and the run ends; "
    "--checkpoint-dir FOLDER writes checkpoints, and --resume goes on from there"
)
_SECRET = "each copy needs the same file `secret`, which only you can read: "


_KINDS: dict[str, click.ParamType[Any]] = {
    "count": click.IntRange(min=0),
    "positive": COUNT,
    "seconds": POSITIVE,
    "folder": PATH,
    "share": click.FloatRange(0, 1, min_open=True),
}


def _of_launch(flag: Flag) -> Add:
    """Declare an option that the launch.py of a bundle has, too."""
    text = f"{flag.help[0].upper()}{flag.help[1:]} [default: {flag.default_text}]."
    return option(flag.name, flag.field, type=_KINDS[flag.kind], help=text)


@cli.command(short_help="Run a bundle, a process per device.")
@bundle_argument
@option(
    "--steps",
    type=COUNT,
    help="Training steps, or batches of inference [default: 10, or all rows of --inputs].",
)
@checkpoint_option("Write checkpoints of the training to this folder.")
@option(
    "--checkpoint-every",
    metavar="N",
    type=click.IntRange(min=0),
    help="Steps between checkpoints; 0: first and last.",
)
@option("--resume", is_flag=True, help="Resume from the last checkpoint in --checkpoint-dir.")
@option("--save", type=PATH, help="Write the trained weights to this folder.")
@option("--inputs", type=PATH, help="Safetensors file of the rows to infer.")
@option("--outputs", type=PATH, help="Write the outputs of each batch to this folder.")
@option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    help="Transport between GPUs. gloo: through host memory; dead processes are replaced. nccl: "
    "direct; they are not [default: nccl where all devices are GPUs].",
)
@option(
    "--background",
    is_flag=True,
    help="Start the run and return; see `status`.",
)
@option("--local", is_flag=True, help="Run all devices here, whatever hosts the plan names.")
@grouped(
    "model",
    option("--seed", type=int, help="Seed of data and dropout [default: the plan's]."),
)
@grouped(
    "cluster and plan",
    option("--port", default=0, help="Rendezvous port; 0 takes any free one."),
)
@grouped(
    "memory",
    option(
        "--offload-dir",
        type=PATH,
        help="Folder of offloaded tensors [default: those of the cluster file's stores].",
    ),
)
@grouped(
    "numerics",
    option(
        "--on-nan",
        type=click.Choice(["stop", "skip", "ignore"]),
        help="At a loss or gradient that is not finite: stop, skip the update on all devices, or "
        "ignore it [default: stop].",
    ),
)
@grouped(
    "checkpoints",
    option(
        "--keep",
        type=click.IntRange(min=2),
        help="Number of checkpoints that stay in --checkpoint-dir [default: 2, or as before].",
    ),
    option(
        "--mtbf",
        metavar="DURATION",
        help='Choose both intervals for this mean time between failures of the job, as "4h".',
    ),
)
@grouped(
    "failures",
    *map(_of_launch, (*FLAGS, *MORE_FLAGS)),
    option(
        "--no-replay",
        is_flag=True,
        help="Replace no process: one death ends the run.",
    ),
    option(
        "--elastic",
        is_flag=True,
        help="Go on without a device whose processes keep dying.",
    ),
    option(
        "--deadline",
        "deadline_s",
        type=POSITIVE,
        help="Longest wait for a message, in seconds [default: 300; 1800 where stages are "
        "compiled].",
    ),
)
@grouped(
    "output",
    option(
        "--logs",
        type=PATH,
        help="Folder of the processes' logs [default: BUNDLE/runs, of the last five runs].",
    ),
    option(
        "--log-every",
        type=COUNT,
        help="Print one step (or batch) in so many, the first and the last [default: each; of more "
        "than 20 steps one in 10, but all of --json].",
    ),
    option(
        "--log-to",
        type=PATH,
        multiple=True,
        metavar="PATH",
        help="Write loss, seconds and rows/s of every step to name.csv; may be given several "
        "times.",
    ),
    option("--events", type=PATH, help="Append what happens to this file, as JSON lines."),
    option(
        "--trace",
        type=PATH,
        metavar="FILE",
        help="Write a trace of every device beside its forecast to this file, for Perfetto.",
    ),
    option(
        "--validate",
        type=PATH,
        metavar="FILE.py",
        help="After checkpoints run `python FILE.py model.safetensors STEP` aside; its last line, "
        "a number or a JSON object of numbers, is printed.",
    ),
    option(
        "--metrics",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="Answer Prometheus on this port of the loopback interface.",
    ),
)
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
    _require_together(choices, elastic, bundle)
    if choices["spares"] is not None:
        require_not_lean(bundle)
    if not no_replay and can_supervise(plan, choices["backend"]) and not is_lean(bundle):
        choices["spares"] = 1 if choices["spares"] is None else choices["spares"]
    if mtbf is not None:
        choices |= intervals(plan, mtbf, {**choices, "elastic": elastic})
    if plan.stages.by_backend:
        click.echo(_COLLECTIVE, err=True)
    if no_replay:
        choices["spares"] = None
    options = RunOptions(**{name: each for name, each in choices.items() if each is not None})
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
        left = interrupted(options.commits) if plan.mode == "train" else nullcontext()
        with left, validations(bundle, validate, options.commits, told) as hear:
            done = _run_here(bundle, options, elastic, as_json, log_every, hear)
        with all_is_done():
            _print_done(plan, done, as_json)


def _require_together(choices: Mapping[str, Any], elastic: bool, bundle: Path) -> None:
    """Refuse options without the one that they are for."""
    if choices["commits"] is None:
        for flag, what in _OF_COMMITS.items():
            if choices[flag] not in (None, False):
                own = bundle / "commits"  # which `resplit` writes
                raise InputError(
                    f"--{flag} needs --checkpoint-dir FOLDER{what}",
                    code="BX3522",
                    help=f"add --checkpoint-dir {own if own.is_dir() else 'checkpoints'}",
                )
    if choices["trace"] is not None and elastic:
        raise InputError("--trace is of one plan, and --elastic may make others", code="BX3523")


def _print_commands(plan: Plan, bundle: Path, options: RunOptions, as_json: bool) -> None:
    """Say what to type on each host."""
    from bigbrain_fx.bundles import commands, secret_command

    typed = commands(plan, options, bundle)
    click.echo(_SEVERAL, err=True)
    if options.spares is not None:
        click.echo(_SECRET + secret_command(), err=True)
    for host, command in typed:
        emit(as_json, {"host": host, "command": command}, f"{host}$ {command}")


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


@contextmanager
def interrupted(commits: Path | str | None) -> Iterator[None]:
    """Say at Ctrl-C what is left of a training."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(Exception):  # that it stops is what counts
            click.echo(_left_of(commits), err=True)
        raise


def _left_of(commits: Path | str | None) -> str:
    from bigbrain_fx.bundles import list_commits

    if commits is None:
        return "nothing of this run was saved; --checkpoint-dir FOLDER writes checkpoints"
    try:
        newest = list_commits(commits, lambda said: None)[0].step
    except InputError:
        return f"nothing of this run was saved: {commits} has no checkpoint"
    return (
        f"the newest checkpoint has {newest} steps: the same command with --resume goes on; "
        "`kill PID` in place of Ctrl-C ends a run after its step, with a checkpoint"
    )


def _print_done(plan: Plan, done: Run, as_json: bool) -> None:
    """Print the summary of a run."""
    from bigbrain_fx.cli.templates import MADE_UP, is_made_up

    if done.stopped_at is not None:
        click.echo(f"stopped before step {done.stopped_at}, as asked", err=True)
    if as_json:
        return
    click.echo("\n".join(_summary(plan, done)))
    if done.median_s and is_made_up(plan.cluster):
        click.echo(MADE_UP, err=True)


def _summary(plan: Plan, done: Run) -> Iterator[str]:
    from bigbrain_fx.cli.console import pace_text

    if done.steps:
        count, first, last = len(done.steps), done.steps[0].loss, done.steps[-1].loss
        died = f"; processes replaced: {done.restarts}" if done.restarts else ""
        yield f"done: {count} step{'s' * (count > 1)}, loss {first:.4f} -> {last:.4f}{died}"
    elif plan.mode == "train" and done.stopped_at is None:
        yield "no step was left to run: --steps counts those before the checkpoint, too"
    if done.batches:
        rows, total_s = sum(b.rows for b in done.batches), sum(b.batch_s for b in done.batches)
        yield f"done: {rows} rows in {total_s:.3f} s, {rows / total_s:.1f} rows/s"
    if done.median_s:
        yield pace_text(plan, done.median_s)
    if done.max_allocated_bytes:
        yield f"GPU memory of tensors, peak: {_sizes(done.max_allocated_bytes)}"
    if done.max_rss_bytes:
        yield f"resident memory, peak: {_sizes(done.max_rss_bytes)}"
    yield f"logs in {done.logs}"


def _require_one_host(given: Mapping[str, object]) -> None:
    """Refuse what only a run that starts here can do."""
    for flag in (flag for flag, value in given.items() if value):
        raise InputError(
            f"{flag} is for a run on one host, and this plan has several",
            code="BX3524",
            help="leave it out, or add --local to run all of it here; `launch.py --json` on the "
            "first host prints each step",
        )


def _tell_validation(as_json: bool, found: Validation) -> None:
    if as_json and not found.failure:
        click.echo(json_line({"validated": found.step, **found.values}))
    else:
        click.echo(str(found), err=as_json or bool(found.failure))


def _sizes(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in found.items())


def intervals(plan: Plan, mtbf: str, choices: dict[str, Any]) -> dict[str, Any]:
    """Choose what was not given: steps between in-memory checkpoints, and between those on disk."""
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
@option(
    "--steps", type=COUNT, default=5, help="Training steps, or batches of inference, to compare."
)
@option("--model", help="The model file, if it is not where it was.")
@option("--processes", is_flag=True, help="Run it as processes over gloo, not in one.")
@json_option
def verify(bundle: Path, steps: int, model: str | None, processes: bool, as_json: bool) -> None:
    """Check that BUNDLE computes what the unsplit model computes."""
    from bigbrain_fx.bundles import verify as verify_bundle
    from bigbrain_fx.cli.console import show_verification

    with working(f"verifying {bundle}"):
        found = verify_bundle(bundle, steps=steps, model=model, processes=processes)
    if as_json:
        click.echo(json_line({**dataclasses.asdict(found), "passed": found.passed}))
    else:
        show_verification(found)
    found.require_passed()
