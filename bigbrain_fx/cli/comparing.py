"""Commands: compare, bench, plugins: which ways to split there are, and how they do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.option_values import chosen, located
from bigbrain_fx.cli.options import (
    COUNT,
    PATH,
    Listed,
    common_options,
    json_option,
    model_options,
    option,
)
from bigbrain_fx.cli.output import json_line, warn
from bigbrain_fx.cli.progress import working
from bigbrain_fx.cli.templates import EXAMPLES, write_starter
from bigbrain_fx.errors import InputError
from bigbrain_fx.weights import Scratch

if TYPE_CHECKING:
    from bigbrain_fx.measure import Comparison


_partitioners = option(
    "--partitioners",
    cls=Listed,
    default="naive,analytical",
    metavar="NAME,...",
    help="Some of {names}.",
)


@cli.command(short_help="Split a model in several ways, side by side; run them, too.")
@click.argument("model")
@_partitioners
@common_options
@model_options
@option(
    "--run",
    "steps",
    type=click.IntRange(min=2),
    metavar="N",
    help="Run each for so many steps in each round, on this host, a process per device.",
)
@option(
    "--rounds",
    type=COUNT,
    default=2,
    help="Rounds of --run; every other goes backwards.",
)
@option("--save", type=PATH, help="Write the bundles to this folder.")
@json_option
def compare(
    model: str,
    devices: Path | None,
    partitioners: str,
    as_json: bool,
    time_limit: float,
    estimator: str | None,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Plan MODEL with each partitioner and put step time, memory and planning time side by side.

    The model is captured once. With --run, the bundles also run here in turns, and their losses are
    compared; devices are then processes of this host. A partitioner without a plan is a row with
    its reason. Exit code 2: no plan; 5: two with equal micro-batches compute different things.
    """
    from bigbrain_fx.measure import compare as compare_all

    if devices is None:
        raise InputError("no devices were given", code="BX3501", help="add --devices cluster.json")
    how = {name: choices[name] for name in ("steps", "rounds", "save")}
    model, names = located(model, choices), partitioners.split(",")
    options = chosen({**choices, "partitioner": "analytical", "estimator": None})
    how |= {"estimator": estimator, "time_limit_s": time_limit}
    with working(f"comparing splits of {model}") as say:
        found = compare_all(model, devices, names, options, on_progress=say, **how)
    warn(found.warnings)
    _show(found, as_json)


def _show(found: Comparison, as_json: bool) -> None:
    """Print a comparison; fail where two plans that should compute the same do not."""
    from bigbrain_fx.cli.console import comparison_json, show_comparison

    if as_json:
        click.echo(json_line(comparison_json(found)))
    else:
        show_comparison(found)
    found.require_sound()


@cli.command(short_help="Figures of this host: an example split and run, forecast and measured.")
@option("--example", type=click.Choice(EXAMPLES), default="gpt", help="Which model, as of `init`.")
@option("-d", "--devices", type=PATH, help="The cluster.json [default: this host, measured first].")
@_partitioners
@option(
    "--steps", type=click.IntRange(min=2), default=20, help="Steps of each in each of two rounds."
)
@json_option
def bench(example: str, devices: Path | None, partitioners: str, steps: int, as_json: bool) -> None:
    """Measure this host, split an example over it in several ways, run each, and compare.

    No checkout is needed. The figures are those of `compare --run`: a process per device, all on
    this host, in turns.
    """
    from bigbrain_fx.cluster import read_cluster
    from bigbrain_fx.measure import compare as compare_all, probe

    with Scratch("bench") as folder:
        model, _ = write_starter(folder, example_name=example)
        with working("measuring this host"):
            cluster = read_cluster(devices) if devices else probe().cluster
        with working(f"splitting and running {example}") as say:
            found = compare_all(
                model, cluster, partitioners.split(","), steps=steps, on_progress=say
            )
    _show(found, as_json)


@cli.command(short_help="List partitioners, presets and estimators.")
@json_option
def plugins(as_json: bool) -> None:
    """List every partitioner, preset and estimator that may be asked for by name.

    Those of other packages come in through the entry points bigbrain_fx.partitioners and
    bigbrain_fx.estimators.
    """
    from bigbrain_fx.cli.console import plugin_json, show_plugins
    from bigbrain_fx.planning import registered

    entries = registered()
    if as_json:
        for entry in entries:
            click.echo(json_line(plugin_json(entry)))
    else:
        show_plugins(entries)
