"""Command: resplit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bigbrain_fx.cli.command import reads
from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import (
    GIVEN,
    PATH,
    bundle_argument,
    checkpoint_option,
    force_bundle_option,
    json_option,
    option,
)
from bigbrain_fx.cli.output import emit, warn
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError


@cli.command(short_help="Go on with a training run on other devices.")
@bundle_argument
@option("-d", "--devices", type=PATH, required=True, help="The cluster.json to go on with.")
@checkpoint_option("Folder of `run --checkpoint-dir` [default: commits/ in the bundle].")
@option(
    "--from-dcp",
    type=PATH,
    help="Go on from what torch.distributed.checkpoint saved (FSDP2, torchtitan) instead.",
)
@option("-o", "--out", type=PATH, required=True, help="Folder of the new bundle.")
@option("--partitioner", help="Another one than the plan's.")
@option(
    "--freeze",
    metavar="MODULES",
    callback=reads("read_names", GIVEN),
    help="Freeze these, as embed,blocks.0-5: no gradients, no optimizer state, cut anew.",
)
@option(
    "--tensor-parallel",
    type=click.IntRange(1),
    help="Devices that compute each stage together, 1 for none [default: as many as the bundle "
    "has, where they go].",
)
@force_bundle_option
@json_option
def resplit(
    bundle: Path,
    devices: Path,
    commits: Path | None,
    out: Path,
    as_json: bool,
    **how: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Write BUNDLE again for other devices, from its last checkpoint: fewer, more, or others.

    Weights, optimizer state, seed and place in the data go along by parameter name; the model file
    is not needed. With --from-dcp they are those of a run of FSDP2 or torchtitan.
    """
    from bigbrain_fx.bundles import resplit as resplit_bundle

    if commits is not None and how["from_dcp"] is not None:
        raise InputError(
            "expected one of --checkpoint-dir and --from-dcp", code="BX3521", help="leave one out"
        )
    with working(f"moving {bundle}"):
        done = resplit_bundle(bundle, devices, out, commits, **how)
    warn(done.warnings)
    found = {"bundle": str(done.bundle), "commits": str(done.commits), "step": done.step}
    again = f"bigbrain-fx run {done.bundle} --checkpoint-dir {done.commits} --resume"
    names = list(done.plan.stages.devices)
    emit(as_json, {**found, "devices": names}, f"{done}\ngo on with: {again}")
