"""The command line: each command calls one public function and prints its noun.

Conventions: progress on stderr; with --json stdout holds JSON alone; exit codes 0 ok, 1 internal, 2 bad
input, 3 no plan, 4 capture failed, 5 verification failed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bigbrain_fx import __version__
from bigbrain_fx.compile import TIME_LIMIT_S, Split
from bigbrain_fx.compile import estimate as estimate_model
from bigbrain_fx.compile import split as split_model
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.explain import explain as explain_plan
from bigbrain_fx.launch import RunOptions, StepLine, commands, hosts
from bigbrain_fx.launch import run as run_bundle
from bigbrain_fx.plan import Options, Plan, read_plan, replan
from bigbrain_fx.plugins import names, preset
from bigbrain_fx.schedule import SCHEDULES
from bigbrain_fx.show import show_explanation, show_forecast, show_plan, show_verification

Command = Callable[..., Any]
console = Console(stderr=True, highlight=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "BIGBRAIN_FX"})
@click.version_option(__version__, prog_name="bigbrain-fx")
def cli() -> None:
    """Split a PyTorch model over the devices of a cluster, as plain Python, one program per device.

    With --debug anywhere on the line every error shows its traceback.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors meant for the user become one message and an exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        cli.main([word for word in given if word != "--debug"], prog_name="bigbrain-fx", standalone_mode=False)
    except BigBrainError as error:
        _fail(error, given, error.exit_code, str(error))
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except Exception as error:  # a fault of ours
        _fail(error, given, 1, f"internal error: {type(error).__name__}: {error}\n  help: run again with --debug and report it")


def _fail(error: BaseException, given: list[str], code: int, text: str) -> None:
    if "--debug" in given:
        raise error
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON alone on stdout.")(command)


def _planning_options(command: Command) -> Command:
    """Add the options that choose a plan."""
    listed = ", ".join(names())
    for option in (
        click.option("--time-limit", "time_limit_s", default=TIME_LIMIT_S, show_default=True, help="Seconds the model file may take."),
        click.option("--seed", default=0, show_default=True, help="Seed of weights, data and dropout."),
        click.option("--micro-batches", type=int, default=None, help="How many a batch is split into [default: the fastest by forecast]."),
        click.option("--schedule", type=click.Choice(sorted(SCHEDULES)), default=None, help="[default: 1f1b for chains, list else]"),
        click.option("--estimator", default=None, help="[default: the partitioner's own]"),
        click.option("--partitioner", default="analytical", show_default=True, help=f"One of {listed}."),
        click.option("--devices", required=True, type=click.Path(path_type=Path), help="The cluster.json."),
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("model")
@_planning_options
@click.option("--out", default="bundle", show_default=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
@_json_option
def split(model: str, devices: Path, out: Path, force: bool, as_json: bool, time_limit_s: float, **choices: Any) -> None:
    """Split MODEL (model.py or model.py:name) over the devices and write a bundle."""
    with _working(f"capturing {model}"):
        made = split_model(model, devices, out, _options(choices), force=force, time_limit_s=time_limit_s)
    for warning in made.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(_split_json(made)))
    else:
        show_plan(made.plan, made.parameters)
        click.echo(f"\nwrote {made.bundle}: read {made.bundle / 'README.md'}, run it with `bigbrain-fx run {made.bundle}`")


@cli.command()
@click.argument("model")
@_planning_options
@_json_option
def estimate(model: str, devices: Path, as_json: bool, time_limit_s: float, **choices: Any) -> None:
    """Say whether MODEL fits and how fast it would train, without weights or devices."""
    with _working(f"capturing {model} without weights"):
        plan = estimate_model(model, devices, _options(choices), time_limit_s=time_limit_s)
    _print_plan(plan, as_json)


@cli.command()
@click.argument("plan", type=click.Path(path_type=Path))
@_json_option
def explain(plan: Path, as_json: bool) -> None:
    """Say what each device of PLAN (a bundle or plan.json) runs, and why each cut is where it is."""
    found = explain_plan(read_plan(plan))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    else:
        show_explanation(found)


@cli.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--devices", default=None, type=click.Path(path_type=Path), help="Another cluster.json: what would it give there?")
@_json_option
def simulate(plan: Path, devices: Path | None, as_json: bool) -> None:
    """Run PLAN (a bundle or plan.json) in the simulator, here or on another cluster."""
    from bigbrain_fx.cluster import read_cluster

    found = read_plan(plan)
    if devices is not None:
        found = replan(found, read_cluster(devices))
    _print_plan(found, as_json)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--steps", default=10, show_default=True, help="Training steps.")
@click.option("--seed", type=int, default=None, help="Seed of data and dropout [default: the plan's].")
@click.option("--port", default=0, show_default=True, help="Rendezvous port; 0 takes any free one.")
@click.option("--save", type=click.Path(path_type=Path), default=None, help="Write the trained tensors to this folder.")
@click.option("--logs", type=click.Path(path_type=Path), default=None, help="Keep the processes' logs here.")
@click.option("--deadline", "deadline_s", default=300.0, show_default=True, help="Longest wait for a message, in seconds.")
@click.option("--local", is_flag=True, help="Run all devices on this host, whatever hosts the plan names.")
@_json_option
def run(bundle: Path, local: bool, as_json: bool, **choices: Any) -> None:
    """Train BUNDLE on this host, one process per device; for several hosts, print their commands."""
    plan = read_plan(bundle)
    if len(hosts(plan)) > 1 and not local:
        click.echo("this plan is for several hosts; copy the bundle to each and run there (or use --local):")
        for host, command in commands(plan, choices["steps"]):
            click.echo(f"  {host}$ {command}")
        return
    options = RunOptions(**choices)
    with _stepping(options.steps, as_json) as on_step:
        done = run_bundle(bundle, options, on_step)
    if not as_json:
        peaks = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in done.max_rss_bytes.items())
        click.echo(f"loss {done.steps[0].loss:.4f} -> {done.steps[-1].loss:.4f}; resident memory {peaks}; logs in {done.logs}")


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--steps", default=5, show_default=True, help="Training steps to compare.")
@click.option("--model", default=None, help="The model file, if it is not where it was.")
@click.option("--processes", is_flag=True, help="Run the bundle in real processes over gloo, not in one process.")
@_json_option
def verify(bundle: Path, steps: int, model: str | None, processes: bool, as_json: bool) -> None:
    """Check that BUNDLE computes what the unsplit model computes."""
    from bigbrain_fx.verify import verify as verify_bundle

    with _working(f"verifying {bundle}"):
        found = verify_bundle(bundle, steps=steps, model=model, processes=processes)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(found), "passed": found.passed}))
    else:
        show_verification(found)
    found.require_passed()


@cli.command()
def schema() -> None:
    """Print the JSON Schema of cluster.json."""
    from bigbrain_fx.cluster import schema as cluster_schema

    click.echo(json.dumps(cluster_schema(), indent=2))


@cli.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace files that are there.")
def init(folder: Path, force: bool) -> None:
    """Write a commented model.py and cluster.json to start from."""
    from bigbrain_fx.starter import write_starter

    for path in write_starter(folder, force=force):
        click.echo(f"wrote {path}")


@cli.command()
@click.option("--write", "out", type=click.Path(path_type=Path), default=None, help="Write a cluster.json of this host.")
@click.option("--devices", default=2, show_default=True, help="How many devices to describe.")
@click.option("--threads", default=1, show_default=True, help="Threads of each CPU device.")
@click.option("--thorough", is_flag=True, help="Measure longer.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@_json_option
def doctor(out: Path | None, devices: int, threads: int, thorough: bool, force: bool, as_json: bool) -> None:
    """Probe this host: memory, matrix-multiply rate, memory bandwidth, loopback."""
    from bigbrain_fx.cluster import to_json as cluster_json
    from bigbrain_fx.doctor import probe

    if out is not None and out.exists() and not force:
        raise InputError(f"{out} exists already", help="give another file, or --force to replace it")
    with _working("probing this host"):
        found = probe(threads=threads, devices=devices, quick=not thorough)
    click.echo(cluster_json(found.cluster) if as_json else str(found))
    if out is not None:
        found.write(out, force=force)
        click.echo(f"wrote {out}", err=True)


# --------------------------------------------------------------------------- helpers


def _options(choices: dict[str, Any]) -> Options:
    partitioner, own = preset(choices["partitioner"])
    count = choices["micro_batches"]
    return Options(partitioner, choices["estimator"] or own, choices["schedule"], count, choices["seed"])


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_plan_json(plan)))
    else:
        show_forecast(plan)


def _split_json(made: Split) -> dict[str, Any]:
    return {"bundle": str(made.bundle), "parameters": made.parameters, "warnings": made.warnings, **_plan_json(made.plan)}


def _plan_json(plan: Plan) -> dict[str, Any]:
    forecast = dataclasses.asdict(plan.forecast)
    return {
        "model": plan.graph.name,
        "plan": plan.key,
        "partitioner": plan.partitioner,
        "estimator": plan.estimator,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "stages": len(plan.stages.stages),
        "step_s": plan.forecast.step_s,
        "devices": forecast["devices"],
    }


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Show that something is going on, on a terminal only."""
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextmanager
def _stepping(steps: int, as_json: bool) -> Iterator[Callable[[StepLine], None]]:
    """Give a function that shows each step: JSON lines, a progress bar, or plain lines."""
    if as_json:
        yield lambda line: click.echo(json.dumps(dataclasses.asdict(line)))
        return
    if not console.is_terminal:
        yield lambda line: click.echo(f"step {line.step:5d}   loss {line.loss:.6f}   {line.step_s:.3f} s")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}   {task.fields[pace]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("steps", total=steps, loss="-", pace="")

        def show(line: StepLine) -> None:
            progress.update(task, advance=1, loss=f"{line.loss:.4f}", pace=f"{line.step_s:.3f} s a step")

        yield show


