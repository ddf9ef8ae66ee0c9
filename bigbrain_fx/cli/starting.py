"""Commands: schema, init: what a user starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import (
    PATH,
    json_option,
)

if TYPE_CHECKING:
    pass


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
    from bigbrain_fx.cli.templates import write_starter

    for path in write_starter(folder, force=force):
        click.echo(json.dumps({"wrote": str(path)}) if as_json else f"wrote {path}")
