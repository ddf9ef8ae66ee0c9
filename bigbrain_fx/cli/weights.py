"""Commands: export, load, rollback: weights of a bundle, and older checkpoints of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import (
    COUNT,
    PATH,
    bundle_argument,
    checkpoint_option,
    json_option,
    option,
)
from bigbrain_fx.cli.output import emit, warn
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError

Given: TypeAlias = Mapping[str, Any]  # options of click


@cli.command(short_help="Join a bundle's weights to one checkpoint, or write it as ONNX.")
@bundle_argument
@option("--to", type=PATH, help="The .safetensors file to write.")
@option("--onnx", type=PATH, help="Write each stage as ONNX to this folder, and check it.")
@option("--dcp", type=PATH, help="Write this folder for torch.distributed.checkpoint.")
@option("--weights", type=PATH, help="What `run --save` wrote [default: the bundle's own].")
@option(
    "--optimizer",
    type=PATH,
    help="With --to: the optimizer state as well, for going on in plain PyTorch; from "
    "--checkpoint-dir.",
)
@checkpoint_option("What `run --checkpoint-dir` wrote: its newest checkpoint.")
@option(
    "--shard-bytes",
    type=COUNT,
    help="Most bytes of a file: writes shards and an index as Hugging Face does.",
)
@json_option
def export(
    bundle: Path,
    as_json: bool,
    **given: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Write the weights of all devices of BUNDLE as one checkpoint of your model.

    model.load_state_dict(safetensors.torch.load_file(FILE)) takes it. With --onnx a bundle for
    inference becomes one ONNX file per stage instead; each is run and compared with its stage.
    With --dcp it is a folder that FSDP2 and torchtitan load; from --checkpoint-dir with the
    optimizer.
    """
    _require_one_way(given)
    if given["dcp"] is not None:
        _export_dcp(bundle, given, as_json)
    elif given["onnx"] is not None:
        _export_onnx(bundle, given["onnx"], as_json)
    elif given["optimizer"] is not None:
        _export_training(bundle, given, as_json)
    else:
        _export_model(bundle, given, as_json)


def _require_one_way(given: Given) -> None:
    """Refuse options that are for different kinds of files."""
    if sum(given[name] is not None for name in ("to", "onnx", "dcp")) != 1:
        raise InputError(
            "expected one of --to, --onnx and --dcp",
            code="BX3531",
            help="--to model.safetensors, --onnx FOLDER, or --dcp FOLDER",
        )
    only_to = given["optimizer"], given["shard_bytes"]
    if given["dcp"] is not None and any(value is not None for value in only_to):
        raise InputError(
            "--optimizer and --shard-bytes are for --to",
            code="BX3532",
            help="leave them out: with --checkpoint-dir the optimizer state is in the folder",
        )
    if given["onnx"] is not None or given["dcp"] is not None:
        return
    commits, weights = given["commits"], given["weights"]
    if given["optimizer"] is not None and (commits is None or weights is not None):
        raise InputError(
            "--optimizer takes weights and state from a checkpoint",
            code="BX3533",
            help="give --checkpoint-dir FOLDER, and leave --weights out",
        )
    if commits is not None and weights is not None:
        raise InputError(
            "expected one of --weights and --checkpoint-dir", code="BX3534", help="leave one out"
        )


def _export_model(bundle: Path, given: Given, as_json: bool) -> None:
    from bigbrain_fx.bundles import export_commit, export_weights

    to, commits, shards = given["to"], given["commits"], given["shard_bytes"]
    more: dict[str, object] = {}
    if commits is None:
        done, said = export_weights(bundle, to, weights=given["weights"], shard_bytes=shards), ""
    else:
        done, step = export_commit(bundle, to, commits, shard_bytes=shards)
        more, said = {"step": step}, f", after {step} steps"
    files = [str(path) for path in done.files]
    about = {"files": files, "tensors": done.tensors, "bytes": done.bytes, **more}
    size = f"{done.tensors} tensors, {done.bytes} bytes"
    emit(as_json, about, f"wrote {', '.join(files)}{said}: {size}")


def _export_training(bundle: Path, given: Given, as_json: bool) -> None:
    from bigbrain_fx.bundles import export_training

    to, optimizer, shards = given["to"], given["optimizer"], given["shard_bytes"]
    done = export_training(bundle, to, optimizer, given["commits"], shard_bytes=shards)
    warn(done.warnings)
    files = [str(path) for path in (*done.model.files, done.optimizer, done.loader)]
    more = ", scaler" * done.has_scaler + ", scheduler=scheduler" * bool(done.scheduler)
    call = f"load_optimizer(model, optimizer, {str(optimizer)!r}{more})"
    first = f"\nbefore that: scheduler = {done.scheduler}" if done.scheduler else ""
    wrote = f"wrote {', '.join(files)}, after {done.step} steps"
    text = f"{wrote}\ngo on: steps = {call}; see {done.loader}{first}"
    emit(as_json, {"files": files, "step": done.step}, text)


def _export_onnx(bundle: Path, folder: Path, as_json: bool) -> None:
    from bigbrain_fx.bundles import export_onnx

    with working(f"exporting {bundle}"):
        found = export_onnx(bundle, folder)
    for stage in found.stages:
        emit(as_json, dataclasses.asdict(stage), str(stage))
    found.require_passed()


def _export_dcp(bundle: Path, given: Given, as_json: bool) -> None:
    from bigbrain_fx.bundles import export_dcp

    folder, step = given["dcp"], "no optimizer state"
    with working(f"exporting {bundle}"):
        done = export_dcp(bundle, folder, weights=given["weights"], commits=given["commits"])
    warn(done.warnings)
    if done.step is not None:
        step = f"the optimizer, after {done.step} steps"
    facts = {"wrote": str(folder), "tensors": done.tensors, "step": done.step}
    emit(as_json, facts, f"wrote {folder}: {done.tensors} tensors, {step}")


@cli.command(short_help="Go back to an earlier checkpoint of a run, or list them.")
@click.argument("commits", metavar="FOLDER", type=PATH)
@option("--to", "step", type=click.IntRange(min=0), help="The step to go back to.")
@json_option
def rollback(commits: Path, step: int | None, as_json: bool) -> None:
    """Make an earlier checkpoint in FOLDER the one that --resume goes on from.

    Newer ones are set aside, not removed, until a run goes on; a run that still writes there ends.
    Without --to it lists the checkpoints. `run --keep N` sets how many there are.
    """
    from bigbrain_fx.bundles import list_commits, rollback as roll_back

    say = partial(click.echo, err=True)
    if step is not None:
        aside = [str(path) for path in roll_back(commits, step, say)]
        text = f"set aside {', '.join(aside)}" if aside else f"step {step} is the newest already"
        text += f"; run --checkpoint-dir {commits} --resume goes on from there"
        emit(as_json, {"step": step, "set_aside": aside}, text)
        return
    for record in list_commits(commits, say):
        facts = {"step": record.step, "folder": record.folder, "devices": list(record.devices)}
        emit(as_json, facts, f"step {record.step}  {record.folder}")


@cli.command(short_help="Put a checkpoint of your model into a bundle.")
@bundle_argument
@option(
    "--from",
    "checkpoint",
    type=PATH,
    required=True,
    help="A safetensors file or folder, by your model's names; also what `run --save` or dcp.save "
    "wrote.",
)
@option("--by-reference", is_flag=True, help="Leave the weights there; do not copy them.")
@json_option
def load(bundle: Path, checkpoint: Path, by_reference: bool, as_json: bool) -> None:
    """Replace the weights of BUNDLE by those of a checkpoint; all of them or none."""
    from bigbrain_fx.bundles import load_weights

    warn(load_weights(bundle, checkpoint, by_reference=by_reference))
    wrote = str(bundle / "weights")
    emit(as_json, {"wrote": wrote}, f"wrote {wrote}")
