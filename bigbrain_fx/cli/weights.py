"""Commands: export, load, rollback: weights in and out of a bundle, and older states of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import COUNT, PATH, bundle_argument, json_option
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError


@cli.command(short_help="Join a bundle's weights to one checkpoint, or write it as ONNX.")
@bundle_argument
@click.option("--to", type=PATH, help="The .safetensors file to write.")
@click.option("--onnx", type=PATH, help="Write each stage as ONNX to this folder, and check it.")
@click.option("--dcp", type=PATH, help="Write this folder for torch.distributed.checkpoint.")
@click.option("--weights", type=PATH, help="What `run --save` wrote [default: the bundle's own].")
@click.option(
    "--optimizer",
    type=PATH,
    help="With --to: the optimizer's state as well, for going on in plain PyTorch; from --commits.",
)
@click.option("--commits", type=PATH, help="What `run --commits` wrote: its newest commit.")
@click.option(
    "--shard-bytes",
    type=COUNT,
    help="Most bytes of a file: writes shards and an index as Hugging Face does.",
)
@json_option
def export(
    bundle: Path,
    to: Path | None,
    onnx: Path | None,
    dcp: Path | None,
    weights: Path | None,
    optimizer: Path | None,
    commits: Path | None,
    shard_bytes: int | None,
    as_json: bool,
) -> None:
    """Write the weights of all devices of BUNDLE as one checkpoint of your model.

    model.load_state_dict(safetensors.torch.load_file(FILE)) takes it. With --onnx a bundle for
    inference becomes one ONNX file per stage instead; each is run and compared with its stage.
    With --dcp it is a folder that FSDP2 and torchtitan load; from --commits with the optimizer.
    """
    if sum(place is not None for place in (to, onnx, dcp)) != 1:
        raise InputError(
            "expected one of --to, --onnx and --dcp",
            code="BX3531",
            help="--to model.safetensors, --onnx FOLDER, or --dcp FOLDER",
        )
    if dcp is not None:
        if optimizer is not None or shard_bytes is not None:
            raise InputError(
                "--optimizer and --shard-bytes are for --to",
                code="BX3532",
                help="leave them out: with --commits the optimizer's state is in the folder",
            )
        _export_dcp(bundle, dcp, weights, commits, as_json)
        return
    if onnx is not None:
        _export_onnx(bundle, onnx, as_json)
        return
    assert to is not None
    if optimizer is not None:
        if commits is None or weights is not None:
            raise InputError(
                "--optimizer takes weights and state from a commit",
                code="BX3533",
                help="give --commits FOLDER, and leave --weights out",
            )
        _export_training(bundle, to, optimizer, commits, shard_bytes, as_json)
        return
    _export_model(bundle, to, weights, commits, shard_bytes, as_json)


def _export_model(
    bundle: Path,
    to: Path,
    weights: Path | None,
    commits: Path | None,
    shard_bytes: int | None,
    as_json: bool,
) -> None:
    from bigbrain_fx.bundles import export_commit, export_weights
    from bigbrain_fx.cli.console import json_line

    if weights is not None and commits is not None:
        raise InputError(
            "expected one of --weights and --commits", code="BX3534", help="leave one out"
        )
    if commits is None:
        done = export_weights(bundle, to, weights=weights, shard_bytes=shard_bytes)
        more, said = {}, ""
    else:
        done, step = export_commit(bundle, to, commits, shard_bytes=shard_bytes)
        more, said = {"step": step}, f", after {step} steps"
    files = [str(path) for path in done.files]
    about = {"files": files, "tensors": done.tensors, "bytes": done.bytes, **more}
    text = f"wrote {', '.join(files)}{said}: {done.tensors} tensors, {done.bytes} bytes"
    click.echo(json_line(about) if as_json else text)


def _export_training(
    bundle: Path, to: Path, optimizer: Path, commits: Path, shard_bytes: int | None, as_json: bool
) -> None:
    from bigbrain_fx.bundles import export_training
    from bigbrain_fx.cli.console import json_line

    done = export_training(bundle, to, optimizer, commits, shard_bytes=shard_bytes)
    for note in done.warnings:
        click.echo(f"warning: {note}", err=True)
    files = [str(path) for path in (*done.model.files, done.optimizer, done.loader)]
    if as_json:
        click.echo(json_line({"files": files, "step": done.step}))
        return
    click.echo(f"wrote {', '.join(files)}, after {done.step} steps")
    more = ", scaler" * done.has_scaler + ", scheduler=scheduler" * bool(done.scheduler)
    call = f"load_optimizer(model, optimizer, {str(optimizer)!r}{more})"
    click.echo(f"go on: steps = {call}; see {done.loader}")
    if done.scheduler:
        click.echo(f"before that: scheduler = {done.scheduler}")


@cli.command(short_help="Go back to an earlier commit of a run, or list them.")
@click.argument("commits", type=PATH)
@click.option("--to", "step", type=click.IntRange(min=0), help="The step to go back to.")
@json_option
def rollback(commits: Path, step: int | None, as_json: bool) -> None:
    """Make an earlier commit in the folder COMMITS the one that --resume goes on from.

    Newer ones are set aside, not removed, until a run goes on; a run that still writes there ends.
    Without --to it lists the commits. `run --keep N` says how many there are.
    """
    from bigbrain_fx.bundles import list_commits, rollback as roll_back
    from bigbrain_fx.cli.console import json_line

    def say(text: str) -> None:
        click.echo(text, err=True)

    if step is not None:
        aside = [str(path) for path in roll_back(commits, step, say)]
        text = f"set aside {', '.join(aside)}" if aside else f"step {step} is the newest already"
        click.echo(json_line({"step": step, "set_aside": aside}) if as_json else text)
        return
    for record in list_commits(commits, say):
        facts = {"step": record.step, "folder": record.folder, "devices": list(record.devices)}
        click.echo(json_line(facts) if as_json else f"step {record.step}  {record.folder}")


def _export_onnx(bundle: Path, folder: Path, as_json: bool) -> None:
    from bigbrain_fx.bundles import export_onnx
    from bigbrain_fx.cli.console import json_line

    with working(f"exporting {bundle}"):
        found = export_onnx(bundle, folder)
    for stage in found.stages:
        click.echo(json_line(dataclasses.asdict(stage)) if as_json else str(stage))
    found.require_passed()


def _export_dcp(
    bundle: Path, folder: Path, weights: Path | None, commits: Path | None, as_json: bool
) -> None:
    from bigbrain_fx.bundles import export_dcp
    from bigbrain_fx.cli.console import json_line

    with working(f"exporting {bundle}"):
        done = export_dcp(bundle, folder, weights=weights, commits=commits)
    for note in done.warnings:
        click.echo(f"warning: {note}", err=True)
    if as_json:
        click.echo(json_line({"wrote": str(folder), "tensors": done.tensors, "step": done.step}))
        return
    what = (
        "no optimizer's state" if done.step is None else f"the optimizer, after {done.step} steps"
    )
    click.echo(f"wrote {folder}: {done.tensors} tensors, {what}")


@cli.command(short_help="Put a checkpoint of your model into a bundle.")
@bundle_argument
@click.option(
    "--from",
    "checkpoint",
    type=PATH,
    required=True,
    help="A safetensors file or folder, by your model's names; also what `run --save` or dcp.save "
    "wrote.",
)
@click.option("--by-reference", is_flag=True, help="Leave the numbers there; do not copy them.")
@json_option
def load(bundle: Path, checkpoint: Path, by_reference: bool, as_json: bool) -> None:
    """Replace the weights of BUNDLE by those of a checkpoint; all of them or none."""
    from bigbrain_fx.bundles import load_weights
    from bigbrain_fx.cli.console import json_line

    notes = load_weights(bundle, checkpoint, by_reference=by_reference)
    for note in notes:
        click.echo(f"warning: {note}", err=True)
    wrote = str(bundle / "weights")
    click.echo(json_line({"wrote": wrote}) if as_json else f"wrote {wrote}")
