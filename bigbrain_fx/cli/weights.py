"""Commands: export, load: weights in and out of a bundle."""

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
@click.option("--weights", type=PATH, help="What `run --save` wrote [default: the bundle's own].")
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
    from bigbrain_fx.bundles import export_weights
    from bigbrain_fx.cli.console import json_line

    done = export_weights(bundle, to, weights=weights, shard_bytes=shard_bytes)
    files = [str(path) for path in done.files]
    if as_json:
        click.echo(json_line({"files": files, "tensors": done.tensors, "bytes": done.bytes}))
    else:
        click.echo(f"wrote {', '.join(files)}: {done.tensors} tensors, {done.bytes} bytes")


def _export_onnx(bundle: Path, folder: Path, as_json: bool) -> None:
    from bigbrain_fx.bundles import export_onnx
    from bigbrain_fx.cli.console import json_line

    with working(f"exporting {bundle}"):
        found = export_onnx(bundle, folder)
    for stage in found.stages:
        click.echo(json_line(dataclasses.asdict(stage)) if as_json else str(stage))
    found.require_passed()


@cli.command(short_help="Put a checkpoint of your model into a bundle.")
@bundle_argument
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
    from bigbrain_fx.bundles import load_weights
    from bigbrain_fx.cli.console import json_line

    notes = load_weights(bundle, checkpoint, by_reference=by_reference)
    for note in notes:
        click.echo(f"warning: {note}", err=True)
    wrote = str(bundle / "weights")
    click.echo(json_line({"wrote": wrote}) if as_json else f"wrote {wrote}")
