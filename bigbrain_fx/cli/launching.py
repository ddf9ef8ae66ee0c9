"""Command: launch-script."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import PATH, bundle_argument, force_file_option, option, require_absent
from bigbrain_fx.errors import os_error_as


@cli.command("launch-script", short_help="A job script for Slurm, Ray, torchrun or ssh.")
@bundle_argument
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@option(
    "--for",
    "kind",
    type=click.Choice(["slurm", "ray", "torchrun", "ssh"]),
    required=True,
    help="What starts it.",
)
@option("-o", "--out", type=PATH, help="The file to write [default: launch.sbatch, .py or .sh].")
@option("--at", help="Where the bundle is on the hosts [default: where it is here].")
@option("--python", default="python", help="What Python is called there.")
@force_file_option
def launch_script(
    bundle: Path,
    arguments: tuple[str, ...],
    kind: str,
    out: Path | None,
    at: str | None,
    python: str,
    force: bool,
) -> None:
    """Write a file that starts BUNDLE's devices on their hosts; ARGUMENTS are for its program.

    For example: launch-script bundle --for slurm -- --steps 1000 --checkpoint-dir /shared/run
    """
    from bigbrain_fx.bundles import STARTERS, Script, is_lean
    from bigbrain_fx.plan import read_plan

    plan, starter = read_plan(bundle), STARTERS[kind]
    path = out or Path(f"launch{starter.suffix}")
    require_absent(path, force)
    where = at or str(bundle.resolve())
    text = starter.text(Script(plan, where, arguments, python, is_lean(bundle)))
    with os_error_as(f"cannot write {path}", code="BX3509", help="give another -o"):
        path.write_text(text, encoding="utf-8")
    click.echo(f"wrote {path}; start it with: {starter.start.format(path)}")
    if shutil.which(starter.needs) is None:
        click.echo(f"note: there is no {starter.needs} on this machine: it was not tried", err=True)
