"""Command: resplit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import PATH, bundle_argument, force_bundle_option, json_option
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError


@cli.command(short_help="Go on with a training run on other devices.")
@bundle_argument
@click.option("-d", "--devices", type=PATH, required=True, help="The cluster.json to go on with.")
@click.option(
    "--commits", type=PATH, help="What `run --commits` wrote [default: the bundle's own commits/]."
)
@click.option(
    "--from-dcp",
    type=PATH,
    help="Go on from what torch.distributed.checkpoint saved (FSDP2, torchtitan) instead.",
)
@click.option("-o", "--out", type=PATH, required=True, help="Folder of the new bundle.")
@click.option("--partitioner", help="Another one than the plan's.")
@click.option(
    "--freeze",
    metavar="MODULES",
    help="Train these no more, as embed,blocks.0-5: no gradients, no optimizer's state, cut anew.",
)
@click.option(
    "--tensor",
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
    from_dcp: Path | None,
    out: Path,
    partitioner: str | None,
    freeze: str | None,
    tensor: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write BUNDLE again for other devices, from its last commit: fewer, more, or others.

    Weights, the optimizer's state, seed and place in the data go along by parameter name; the model
    file is not needed. With --from-dcp they are those of a run of FSDP2 or torchtitan.
    """
    from bigbrain_fx.bundles import resplit as resplit_bundle
    from bigbrain_fx.cli.console import json_line

    if commits is not None and from_dcp is not None:
        raise InputError(
            "expected one of --commits and --from-dcp", code="BX3521", help="leave one out"
        )
    names = tuple(name.strip() for name in freeze.split(",")) if freeze is not None else ()
    how: dict[str, Any] = {"partitioner": partitioner, "force": force, "from_dcp": from_dcp}
    how |= {"freeze": names, "tensor": tensor}
    with working(f"moving {bundle}"):
        done = resplit_bundle(bundle, devices, out, commits, **how)
    for warning in done.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        found = {"bundle": str(done.bundle), "commits": str(done.commits), "step": done.step}
        click.echo(json_line({**found, "devices": list(done.plan.stages.devices)}))
        return
    click.echo(str(done))
    click.echo(f"go on with: bigbrain-fx run {done.bundle} --commits {done.commits} --resume")
