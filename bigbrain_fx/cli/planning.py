"""Commands: split, estimate, explain, simulate."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigbrain_fx.cli.command import grouped, reads
from bigbrain_fx.cli.failure_options import failure_options, print_failures
from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.option_values import chosen, layers_of, located
from bigbrain_fx.cli.options import (
    GIVEN,
    PATH,
    devices_option,
    force_bundle_option,
    force_file_option,
    goal_options,
    json_option,
    model_options,
    option,
    planning_options,
    profile_option,
    require_absent,
    verbose_option,
)
from bigbrain_fx.cli.output import json_line
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError, SplitWarning

if TYPE_CHECKING:
    from bigbrain_fx.bundles import Split
    from bigbrain_fx.plan import Goals, Plan, Source


@contextmanager
def split_warnings() -> Iterator[None]:
    """Print the warnings of a split at its end, a line each."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SplitWarning)
        yield
    for each in found:
        if issubclass(each.category, SplitWarning):
            click.echo(f"warning: {each.message}", err=True)
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@cli.command(short_help="Split a model over devices and write a bundle.")
@click.argument("model")
@devices_option
@option("-o", "--out", default="bundle", type=PATH, help="Folder to write.")
@planning_options
@goal_options
@model_options
@option("--weights", type=PATH, help="Start from this safetensors file or folder.")
@grouped(
    "model",
    option(
        "--weights-by-reference",
        is_flag=True,
        help="Leave the weights in that file; do not copy them.",
    ),
)
@grouped(
    "cluster and plan",
    option(
        "--like",
        type=PATH,
        help="Place the ops as this bundle of the same model does (its devices).",
    ),
)
@grouped(
    "output",
    option("--lean", is_flag=True, help="Leave the supervisor out: for torchrun."),
    option(
        "--bare",
        is_flag=True,
        help="Write the plain pipeline alone, to be read whole: for torchrun.",
    ),
    option(
        "--with",
        "extras",
        metavar="NAME,...",
        callback=reads("read_names", GIVEN),
        help="Add files for options of a run: hosts (launch.py --listen), mpi (--transport mpi), "
        "suspicion (--suspect), pipelining (for torch's own runner), watch (launch.py --hang: it "
        "ends processes that hang, and minds memory, as bigbrain-fx run always does), checks (of "
        "batches beyond shape and type, with what to change).",
    ),
    option(
        "--no-rehearse",
        is_flag=True,
        help="Do not compare a few training steps of the bundle with the model file's own loop.",
    ),
)
@grouped("output", option("--timings", is_flag=True, help="Say where the time went."))
@force_bundle_option
@verbose_option
@json_option
def split(
    model: str,
    devices: Path | None,
    out: Path,
    no_rehearse: bool,
    timings: bool,
    verbose: bool,
    as_json: bool,
    time_limit: float,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Split MODEL over the devices and write a bundle.

    MODEL is model.py or model.py:name, which is run as code in a child process; hf:config.json, a
    Hugging Face configuration; or an ONNX file.
    """
    from bigbrain_fx import bundles
    from bigbrain_fx.plan import telling

    if choices["weights_by_reference"] and choices["weights"] is None:
        raise InputError(
            "--weights-by-reference is for --weights", code="BX3515", help="add --weights FOLDER"
        )
    own = ("like", "weights", "weights_by_reference", "force", "lean", "bare", "extras")
    how = {name: choices[name] for name in own}
    model, options = located(model, choices), chosen(choices)
    with split_warnings(), working(f"splitting {model}") as say, telling(say):
        made = bundles.split(
            model, devices, out, options, rehearse=not no_rehearse, time_limit_s=time_limit, **how
        )
    _print_split(made, verbose, as_json, options.goals, is_unrehearsed=no_rehearse)
    if timings and not as_json:
        from bigbrain_fx.cli.console import show_timings

        show_timings(made.timings)


def _print_split(
    made: Split, verbose: bool, as_json: bool, goals: Goals | None, *, is_unrehearsed: bool
) -> None:
    from bigbrain_fx.cli.console import show_plan, split_json
    from bigbrain_fx.cli.money_text import money_json, money_lines

    if as_json:
        click.echo(json_line({**split_json(made), **money_json(made.plan, goals)}))
        return
    show_plan(made.plan, made.parameters, verbose)
    for line in money_lines(made.plan, goals):
        click.echo(line)
    if made.rehearsed:
        count = made.plan.micro_batches
        parts = f" in {count} micro-batches" if count > 1 else ""
        click.echo(f"beside your own loop{parts}: {made.rehearsed}")
    elif is_unrehearsed and made.plan.mode == "train":
        click.echo(f"not compared with your own loop: bigbrain-fx verify {made.bundle} does that")
    if made.plan.mode == "train":
        for line in _left_open(made.plan.source):
            click.echo(line)
    click.echo(f"\nwrote {made.bundle}; read {made.bundle / 'README.md'}")
    verb = "train it" if made.plan.mode == "train" else "use it"
    click.echo(f"{verb}: bigbrain-fx run {made.bundle}")


def _left_open(source: Source) -> Iterator[str]:
    """Yield how a bundle trains where the model file does not say it."""
    if not source.has_optimizer:
        rate = "learning rate 0.001, weight decay 0.01"
        yield f"optimizer: torch's AdamW as it comes ({rate}); the model file defines none"
    if not source.has_batches:
        yield "data: the example batch again and again; the model file defines no batches"


@cli.command(short_help="Will it fit, and how fast? No weights, no devices.")
@click.argument("model")
@devices_option
@planning_options
@goal_options
@model_options
@option("-o", "--out", type=PATH, help="Write the plan to this file, for explain, simulate.")
@option("--price", help="Of all devices by the hour, like 2.1/h: what do tokens cost?")
@force_file_option
@verbose_option
@json_option
def estimate(
    model: str,
    devices: Path | None,
    out: Path | None,
    force: bool,
    price: str | None,
    verbose: bool,
    as_json: bool,
    time_limit: float,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Forecast whether MODEL fits and how fast it trains, without weights or devices."""
    from bigbrain_fx import bundles
    from bigbrain_fx.cli.prices import hourly
    from bigbrain_fx.plan import telling, write_plan

    if devices is None:
        raise InputError("no devices were given", code="BX3516", help="add --devices cluster.json")
    if price is not None:
        hourly(price)
    require_absent(out, force)
    model, options = located(model, choices), chosen(choices)
    with split_warnings(), working(f"estimating {model} without weights") as say, telling(say):
        plan = bundles.estimate(model, devices, options, time_limit_s=time_limit)
    if out is not None:
        write_plan(plan, out)
    _print_plan(plan, verbose, as_json, price, options.goals)
    if out is not None:
        click.echo(f"wrote {out}: bigbrain-fx explain {out}", err=True)


@cli.command(short_help="Why each cut of a plan is where it is.")
@click.argument("plan", type=PATH)
@option(
    "--placement", type=PATH, help="Write the device of each module to this file, for `--place`."
)
@option(
    "--axes",
    is_flag=True,
    help="List instead the dimensions that --tensor-parallel could divide, for --tp-axes.",
)
@force_file_option
@json_option
def explain(plan: Path, placement: Path | None, axes: bool, force: bool, as_json: bool) -> None:
    """Explain what each device of PLAN (a bundle or plan.json) runs, and why it is cut there."""
    from bigbrain_fx.cli.axes_text import print_axes
    from bigbrain_fx.cli.console import search_json, show_explained
    from bigbrain_fx.plan import explain as explain_plan, read_plan, write_placement

    known = read_plan(plan)
    if placement is not None:
        write_placement(known, placement, force)
        click.echo(f"wrote {placement}: edit it and give it to split --place", err=True)
    if axes:
        print_axes(known.graph, as_json)
        return
    found, searched = explain_plan(known), known.search
    if as_json:
        fields = dataclasses.asdict(found)
        click.echo(json_line({**fields, "search": search_json(searched) if searched else None}))
        return
    show_explained(known, found)


@cli.command(short_help="Forecast a plan, here or on another cluster.")
@click.argument("plan", type=PATH)
@option(
    "-d",
    "--devices",
    type=PATH,
    multiple=True,
    help="Another cluster.json to forecast for. Several: a table, the cheapest first.",
)
@option(
    "--price", multiple=True, help="Of all devices by the hour, like 2.1/h; one for each cluster."
)
@option("--again", is_flag=True, help="Place the model again, for the other cluster.")
@profile_option
@option(
    "--trace",
    type=PATH,
    help="Let devices come and go as this file says: what is computed, what does it cost?",
)
@failure_options
@verbose_option
@json_option
def simulate(
    plan: Path,
    devices: tuple[Path, ...],
    price: tuple[str, ...],
    again: bool,
    profile: Path | None,
    trace: Path | None,
    mtbf: str | None,
    host_share: float,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run the programs of PLAN (a bundle or plan.json) in the simulator, here or elsewhere.

    With --mtbf processes fail: it prints the best intervals of both kinds of checkpoints, and the
    share of the time that is training. With --trace devices come and go.
    """
    from bigbrain_fx.bundles import simulate as simulate_plan
    from bigbrain_fx.cli.console import show_offers
    from bigbrain_fx.cli.prices import offers
    from bigbrain_fx.cli.tracing import print_trace

    if again and not devices:
        raise InputError(
            "--again is for another cluster", code="BX3517", help="add --devices cluster.json"
        )
    if trace is not None and (mtbf is not None or len(devices) > 1):
        raise InputError(
            "--trace says which devices of one cluster are lost",
            code="BX3537",
            help="leave --mtbf out, and give one --devices at most",
        )
    known = _with_profile(plan, profile)
    if len(devices) > 1:
        if mtbf is not None:
            raise InputError("--mtbf is for one cluster", code="BX3518", help="give one --devices")
        rows = offers(known, devices, price, again=again)
        if as_json:
            click.echo(json_line({"offers": [dataclasses.asdict(each) for each in rows]}))
        else:
            show_offers(rows)
        return
    found = simulate_plan(known, devices[0] if devices else None, again=again)
    if trace is not None:
        print_trace(found, trace, as_json)
    elif mtbf is None:
        _print_plan(found, verbose, as_json, price[0] if price else None)
    else:
        print_failures(found, mtbf, host_share, as_json)


def _with_profile(path: Path, profile: Path | None) -> Plan:
    """Read a plan; a profile of layers, where one is given, prices its ops."""
    from bigbrain_fx.plan import read_plan

    plan = read_plan(path)
    return dataclasses.replace(plan, estimator=layers_of(profile) or plan.estimator)


def _print_plan(
    plan: Plan, verbose: bool, as_json: bool, price: str | None, goals: Goals | None = None
) -> None:
    from bigbrain_fx.cli.console import plan_json, show_forecast
    from bigbrain_fx.cli.money_text import money_json, money_lines
    from bigbrain_fx.cli.prices import cost, hourly

    paid = None if price is None else cost(plan, hourly(price))
    if as_json:
        fields = {"cost": None if paid is None else dataclasses.asdict(paid)}
        click.echo(json_line({**plan_json(plan), **fields, **money_json(plan, goals)}))
        return
    show_forecast(plan, verbose)
    for line in money_lines(plan, goals):
        click.echo(line)
    if paid is not None:
        click.echo(f"at {price}: {paid}")
