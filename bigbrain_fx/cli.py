"""The command line: each command calls one public function and prints its noun.

Conventions: with --json stdout holds JSON alone, one object a line, and everything else goes to
stderr; exit codes 0 ok, 1 internal, 2 bad input, 3 no feasible plan, 4 capture failed,
5 verification failed, 130 stopped. Rooms are imported by the command that needs them: `--help` is
quick.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from bigbrain_fx import __version__
from bigbrain_fx.cli_options import (
    PATH,
    capture_options,
    chosen,
    json_option,
    located,
    model_options,
    planning_options,
    read_rows,
)
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.progress import stepping, working

if TYPE_CHECKING:
    from bigbrain_fx.plan import Plan

EPILOG = """Every option can come from the environment: --micro-batches of any command from
BIGBRAIN_FX_MICRO_BATCHES, --steps of `run` from BIGBRAIN_FX_RUN_STEPS. Exit codes: 0 ok,
1 internal, 2 bad input, 3 no feasible plan, 4 capture failed, 5 verification failed."""

_SETTINGS = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "BIGBRAIN_FX"}


@click.group(context_settings=_SETTINGS, epilog=EPILOG)
@click.version_option(__version__, prog_name="bigbrain-fx")
@click.option(
    "--debug", is_flag=True, help="Show the traceback of an error (anywhere on the line)."
)
def cli(debug: bool) -> None:
    """Split a PyTorch model over the devices of a cluster: plain Python, a program per device."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors meant for the user become one message and an exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given or os.environ.get("BIGBRAIN_FX_DEBUG", "0") not in ("", "0")
    words = [word for word in given if word != "--debug"]
    gc.set_threshold(200_000, 20, 100)  # graphs and plans are many small objects that stay
    try:
        with _terminable():
            cli.main(words, prog_name="bigbrain-fx", standalone_mode=False)
    except BigBrainError as error:
        _fail(error, debug, error.exit_code, str(error))
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except Exception as error:  # a fault of ours
        text = f"internal error: {type(error).__name__}: {error}"
        _fail(
            error, debug, 1, f"{text}\n  help: run it again with --debug and report what it shows"
        )


def _fail(error: BaseException, debug: bool, code: int, text: str) -> None:
    if debug:
        traceback.print_exception(error)
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does: a run ends its processes before it goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------- planning


@cli.command(short_help="Split a model over devices and write a bundle.")
@click.argument("model")
@planning_options
@model_options
@click.option("--out", default="bundle", show_default=True, type=PATH, help="Folder to write.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
@click.option(
    "--like", type=PATH, help="Place the ops as this bundle of the same model does (its devices)."
)
@click.option("--weights", type=PATH, help="Take them from this safetensors file or folder.")
@click.option(
    "--weights-by-reference", is_flag=True, help="Leave the numbers there; do not copy them."
)
@json_option
def split(
    model: str,
    devices: Path | None,
    out: Path,
    force: bool,
    like: Path | None,
    weights: Path | None,
    weights_by_reference: bool,
    as_json: bool,
    time_limit: float,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Split MODEL over the devices and write a bundle.

    MODEL is model.py or model.py:name, which is code and is run as code, in a child process; or
    hf:config.json, a Hugging Face configuration, for transformers' own class; or an ONNX file.
    """
    from bigbrain_fx import compile as road
    from bigbrain_fx.show import json_line, show_plan, split_json

    if weights_by_reference and weights is None:
        raise InputError("--weights-by-reference is for --weights", help="add --weights FOLDER")
    model, options = located(model, choices), chosen(choices)
    with working(f"capturing {model}"):
        made = road.split(
            model,
            devices,
            out,
            options,
            like=like,
            weights=weights,
            weights_by_reference=weights_by_reference,
            force=force,
            time_limit_s=time_limit,
        )
    for warning in made.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json_line(split_json(made)))
        return
    show_plan(made.plan, made.parameters)
    click.echo(f"\nwrote {made.bundle}; read {made.bundle / 'README.md'}")
    verb = "train it" if made.plan.mode == "train" else "use it"
    click.echo(f"{verb}: bigbrain-fx run {made.bundle}")


@cli.command(short_help="Will it fit, and how fast? No weights, no devices.")
@click.argument("model")
@planning_options
@model_options
@json_option
def estimate(
    model: str,
    devices: Path | None,
    as_json: bool,
    time_limit: float,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Say whether MODEL fits and how fast it would train, without weights or devices."""
    from bigbrain_fx import compile as road

    if devices is None:
        raise InputError("no devices were given", help="add --devices cluster.json")
    model, options = located(model, choices), chosen(choices)
    with working(f"capturing {model} without weights"):
        plan = road.estimate(model, devices, options, time_limit_s=time_limit)
    _print_plan(plan, as_json)


@cli.command(short_help="Why each cut of a plan is where it is.")
@click.argument("plan", type=PATH)
@json_option
def explain(plan: Path, as_json: bool) -> None:
    """Say what each device of PLAN (a bundle or plan.json) runs, and why it is cut there."""
    from bigbrain_fx.explain import explain as explain_plan
    from bigbrain_fx.plan import read_plan
    from bigbrain_fx.show import json_line, show_explanation

    found = explain_plan(read_plan(plan))
    if as_json:
        click.echo(json_line(dataclasses.asdict(found)))
    else:
        show_explanation(found)


@cli.command(short_help="Forecast a plan, here or on another cluster.")
@click.argument("plan", type=PATH)
@click.option("--devices", type=PATH, help="Another cluster.json: what would it give there?")
@click.option("--again", is_flag=True, help="Place the model again, for the other cluster.")
@json_option
def simulate(plan: Path, devices: Path | None, again: bool, as_json: bool) -> None:
    """Run the programs of PLAN (a bundle or plan.json) in the simulator, here or elsewhere."""
    from bigbrain_fx.compile import simulate as simulate_plan
    from bigbrain_fx.plan import read_plan

    if again and devices is None:
        raise InputError("--again is for another cluster", help="add --devices cluster.json")
    _print_plan(simulate_plan(read_plan(plan), devices, again=again), as_json)


def _print_plan(plan: Plan, as_json: bool) -> None:
    from bigbrain_fx.show import json_line, plan_json, show_forecast

    if as_json:
        click.echo(json_line(plan_json(plan)))
    else:
        show_forecast(plan)


# --------------------------------------------------------------------------- running


@cli.command(short_help="Run a bundle, a process per device.")
@click.argument("bundle", type=PATH)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Training steps, or batches of inference [default: 10, or all rows of --inputs].",
)
@click.option("--seed", type=int, help="Seed of data and dropout [default: the plan's].")
@click.option(
    "--port",
    default=0,
    show_default=True,
    help="Rendezvous port; 0 takes any free one.",
)
@click.option("--save", type=PATH, help="Write the trained tensors to this folder.")
@click.option("--inputs", type=PATH, help="Infer these rows: a safetensors file of input tensors.")
@click.option("--outputs", type=PATH, help="Write the outputs of each batch to this folder.")
@click.option("--logs", type=PATH, help="Keep the processes' logs here.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Longest wait for a message, in seconds.",
)
@click.option("--local", is_flag=True, help="Run all devices here, whatever hosts the plan names.")
@json_option
def run(
    bundle: Path,
    local: bool,
    as_json: bool,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Run BUNDLE on this host, a process per device; for several hosts, print their commands.

    It trains, or infers, as it was split for.
    """
    from bigbrain_fx.launch import DEFAULT_STEPS, RunOptions, commands, hosts
    from bigbrain_fx.launch import run as run_bundle
    from bigbrain_fx.plan import read_plan
    from bigbrain_fx.show import json_line

    plan, options = read_plan(bundle), RunOptions(**choices)
    if len(hosts(plan)) > 1 and not local:
        click.echo(
            "for several hosts: copy the bundle to each, run there (or add --local)", err=True
        )
        for host, command in commands(plan, options):
            entry = json_line({"host": host, "command": command})
            click.echo(entry if as_json else f"{host}$ {command}")
        return
    total = options.steps or (None if options.inputs else DEFAULT_STEPS)
    with stepping(total, as_json) as show:
        done = run_bundle(bundle, options, show, show)
    if as_json:
        return
    peaks = ", ".join(f"{name} {n / 2**20:.0f} MiB" for name, n in done.max_rss_bytes.items())
    if done.steps:
        click.echo(f"loss {done.steps[0].loss:.4f} -> {done.steps[-1].loss:.4f}")
    if done.batches:
        rows, total_s = sum(b.rows for b in done.batches), sum(b.batch_s for b in done.batches)
        click.echo(f"{rows} rows in {total_s:.3f} s: {rows / total_s:.1f} rows a second")
    click.echo(f"resident memory {peaks}; logs in {done.logs}")


@cli.command(short_help="Check a bundle against the unsplit model.")
@click.argument("bundle", type=PATH)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Training steps, or batches of inference, to compare.",
)
@click.option("--model", help="The model file, if it is not where it was.")
@click.option("--processes", is_flag=True, help="Run it as processes over gloo, not in one.")
@json_option
def verify(bundle: Path, steps: int, model: str | None, processes: bool, as_json: bool) -> None:
    """Check that BUNDLE computes what the unsplit model computes."""
    from bigbrain_fx.show import json_line, show_verification
    from bigbrain_fx.verify import verify as verify_bundle

    with working(f"verifying {bundle}"):
        found = verify_bundle(bundle, steps=steps, model=model, processes=processes)
    if as_json:
        click.echo(json_line({**dataclasses.asdict(found), "passed": found.passed}))
    else:
        show_verification(found)
    found.require_passed()


# --------------------------------------------------------------------------- weights


@cli.command(short_help="Join a bundle's weights to one checkpoint, or write it as ONNX.")
@click.argument("bundle", type=PATH)
@click.option("--to", type=PATH, help="The .safetensors file to write.")
@click.option("--onnx", type=PATH, help="Write each stage as ONNX to this folder, and check it.")
@click.option("--weights", type=PATH, help="What `run --save` wrote [default: the bundle's own].")
@click.option(
    "--shard-bytes",
    type=click.IntRange(min=1),
    help="Most bytes of a file: writes shards and an index as Hugging Face does.",
)
@json_option
def export(
    bundle: Path,
    to: Path | None,
    onnx: Path | None,
    weights: Path | None,
    shard_bytes: int | None,
    as_json: bool,
) -> None:
    """Write the weights of all devices of BUNDLE as one checkpoint of your model.

    model.load_state_dict(safetensors.torch.load_file(FILE)) takes it. With --onnx a bundle for
    inference becomes one ONNX file per stage instead; each is run and compared with its stage.
    """
    if (to is None) == (onnx is None):
        raise InputError(
            "expected one of --to and --onnx", help="--to model.safetensors, or --onnx FOLDER"
        )
    if onnx is not None:
        _export_onnx(bundle, onnx, as_json)
        return
    assert to is not None
    from bigbrain_fx.checkpoints import export_weights
    from bigbrain_fx.show import json_line

    done = export_weights(bundle, to, weights=weights, shard_bytes=shard_bytes)
    files = [str(path) for path in done.files]
    if as_json:
        click.echo(json_line({"files": files, "tensors": done.tensors, "bytes": done.bytes}))
    else:
        click.echo(f"wrote {', '.join(files)}: {done.tensors} tensors, {done.bytes} bytes")


def _export_onnx(bundle: Path, folder: Path, as_json: bool) -> None:
    from bigbrain_fx.onnx_out import export_onnx
    from bigbrain_fx.show import json_line

    with working(f"exporting {bundle}"):
        found = export_onnx(bundle, folder)
    for stage in found.stages:
        click.echo(json_line(dataclasses.asdict(stage)) if as_json else str(stage))
    found.require_passed()


@cli.command(short_help="Put a checkpoint of your model into a bundle.")
@click.argument("bundle", type=PATH)
@click.option(
    "--from",
    "checkpoint",
    type=PATH,
    required=True,
    help="A safetensors file or folder, by your model's names; also what `run --save` wrote.",
)
@click.option("--by-reference", is_flag=True, help="Leave the numbers there; do not copy them.")
@json_option
def load(bundle: Path, checkpoint: Path, by_reference: bool, as_json: bool) -> None:
    """Replace the weights of BUNDLE by those of a checkpoint; all of them or none."""
    from bigbrain_fx.checkpoints import load_weights
    from bigbrain_fx.show import json_line

    notes = load_weights(bundle, checkpoint, by_reference=by_reference)
    for note in notes:
        click.echo(f"warning: {note}", err=True)
    wrote = str(bundle / "weights")
    click.echo(json_line({"wrote": wrote}) if as_json else f"wrote {wrote}")


# --------------------------------------------------------------------------- setting up


@cli.command(short_help="Print the JSON Schema of cluster.json.")
@json_option
def schema(as_json: bool) -> None:
    """Print the JSON Schema of cluster.json."""
    from bigbrain_fx.cluster import schema as cluster_schema

    click.echo(json.dumps(cluster_schema(), indent=None if as_json else 2))


@cli.command(short_help="Write a model.py and cluster.json to start from.")
@click.argument("folder", default=".", type=PATH)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@json_option
def init(folder: Path, force: bool, as_json: bool) -> None:
    """Write a commented model.py and cluster.json to start from."""
    from bigbrain_fx.starter import write_starter

    for path in write_starter(folder, force=force):
        click.echo(json.dumps({"wrote": str(path)}) if as_json else f"wrote {path}")


@cli.command(short_help="Fit op times to profiles, for the estimator `learned`.")
@click.argument("profiles", type=PATH)
@click.option(
    "--model",
    default="random-forest",
    show_default=True,
    help="One of linear, svm, random-forest, boosting.",
)
@click.option("--two-stage", is_flag=True, help="Predict the share of the roofline first.")
@click.option(
    "--out", default="costs.json", show_default=True, type=PATH, help="The file to write."
)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@json_option
def fit(profiles: Path, model: str, two_stage: bool, out: Path, force: bool, as_json: bool) -> None:
    """Fit a model of op times to PROFILES, which `profile` wrote.

    The file is plain JSON. The error it prints is of ops that the fit did not see, a fifth of them
    at a time. To use it: BIGBRAIN_LEARNED_COSTS=costs.json and --estimator learned.
    """
    from bigbrain_fx.fit import fit_file
    from bigbrain_fx.show import json_line

    if os.path.lexists(out) and not force:
        raise InputError(
            f"{out} exists already", help="give another file, or --force to replace it"
        )
    with working(f"fitting {model} to {profiles}"):
        found = fit_file(profiles, out, model, two_stage)
    if as_json:
        facts = {"machines": found.machines, "times": found.times, "wrote": str(out)}
        errors = {"mape": found.mape, "median": found.median}
        click.echo(json_line({"model": model, "two_stage": two_stage, **facts, **errors}))
        return
    click.echo(f"{model} of {found.times} times on {'; '.join(found.machines)}")
    click.echo(f"ops it did not see: off by {found.mape:.1%}, the median by {found.median:.1%}")
    click.echo(f"wrote {out}; use it: BIGBRAIN_LEARNED_COSTS={out} and --estimator learned")


@cli.command(short_help="Measure this host; write its cluster.json.")
@click.option("--write", "out", type=PATH, help="Write a cluster.json of this host.")
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many devices to describe.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Threads of each CPU device.",
)
@click.option("--thorough", is_flag=True, help="Measure longer.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@json_option
def doctor(
    out: Path | None, devices: int, threads: int, thorough: bool, force: bool, as_json: bool
) -> None:
    """Probe this host: memory, matrix-multiply rate, memory bandwidth, loopback.

    With --json the cluster has one field more, "measured": matrix products by size and dtype, and
    every other figure before it was rounded.
    """
    from bigbrain_fx.cluster import to_json as cluster_json
    from bigbrain_fx.doctor import probe

    if out is not None and os.path.lexists(out) and not force:
        raise InputError(
            f"{out} exists already", help="give another file, or --force to replace it"
        )
    with working("probing this host"):
        found = probe(threads=threads, devices=devices, quick=not thorough)
    described = json.loads(cluster_json(found.cluster))
    click.echo(json.dumps({**described, "measured": found.measured}) if as_json else str(found))
    if out is not None:
        found.write(out, force=force)
        click.echo(f"wrote {out}", err=True)


@cli.command(short_help="Measure a model's ops on this host.")
@click.argument("model")
@click.option(
    "--db", type=PATH, required=True, help="The profile database; made if it is not there."
)
@click.option(
    "--rows",
    metavar="N,...",
    help="Rows of a micro-batch, each of them [default: the example batch's].",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Threads to compute with.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Runs of the model for each number of rows.",
)
@capture_options
@model_options
@json_option
def profile(
    model: str,
    db: Path,
    rows: str | None,
    threads: int,
    rounds: int,
    time_limit: float,
    mode: str | None,
    seed: int,
    as_json: bool,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Measure the distinct ops of MODEL on this host, for the estimator `measured`.

    What the database has already is not measured again: run it again to go on.
    """
    from bigbrain_fx.profiler import ProfileOptions
    from bigbrain_fx.profiler import profile as measure
    from bigbrain_fx.show import json_line

    options = ProfileOptions(
        read_rows(rows), threads, rounds, seed, mode != "eval", time_limit_s=time_limit
    )
    with working(f"profiling {model}") as show:
        found = measure(located(model, choices), db, options, show)
    for entry in found.measured:
        facts = {**dataclasses.asdict(entry), "agreement": entry.agreement}
        facts |= {"model": found.model, "machine": found.machine}
        click.echo(json_line(facts) if as_json else str(entry))
    if not as_json:
        click.echo(f"{found.model} on {found.machine}; see {db}")
