"""Commands: split, estimate, explain, simulate."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigbrain_fx.cli.failing import failure_options, print_failures
from bigbrain_fx.cli.given import chosen, layers_of, located
from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import (
    PATH,
    force_bundle_option,
    force_file_option,
    json_option,
    model_options,
    planning_options,
    profile_option,
    require_absent,
)
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError, SplitWarning

if TYPE_CHECKING:
    from bigbrain_fx.cli.prices import Offer
    from bigbrain_fx.plan import Plan


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
@planning_options
@model_options
@click.option("-o", "--out", default="bundle", type=PATH, help="Folder to write.")
@force_bundle_option
@click.option(
    "--like", type=PATH, help="Place the ops as this bundle of the same model does (its devices)."
)
@click.option("--weights", type=PATH, help="Take them from this safetensors file or folder.")
@click.option(
    "--weights-by-reference", is_flag=True, help="Leave the numbers there; do not copy them."
)
@click.option(
    "--lean", is_flag=True, help="Leave out what replaces processes that die: for torchrun."
)
@click.option(
    "--bare", is_flag=True, help="Write the plain pipeline alone, to be read whole: for torchrun."
)
@click.option(
    "--with",
    "extras",
    metavar="NAME,...",
    default="",
    help="Add files that a run may want: hosts (launch.py --listen), mpi (--transport mpi), "
    "suspicion (--suspect), pipelining (for torch's own runner).",
)
@click.option(
    "--no-rehearse",
    is_flag=True,
    help="Do not train a few steps of the bundle beside the model file's own loop.",
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
    lean: bool,
    bare: bool,
    extras: str,
    no_rehearse: bool,
    as_json: bool,
    time_limit: float,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Split MODEL over the devices and write a bundle.

    MODEL is model.py or model.py:name, which is code and is run as code, in a child process; or
    hf:config.json, a Hugging Face configuration, for transformers' own class; or an ONNX file.
    """
    from bigbrain_fx import bundles
    from bigbrain_fx.cli.console import json_line, show_plan, split_json
    from bigbrain_fx.plan import telling

    if weights_by_reference and weights is None:
        raise InputError(
            "--weights-by-reference is for --weights", code="BX3515", help="add --weights FOLDER"
        )
    model, options = located(model, choices), chosen(choices)
    with split_warnings(), working(f"splitting {model}") as say, telling(say):
        made = bundles.split(
            model,
            devices,
            out,
            options,
            like=like,
            weights=weights,
            weights_by_reference=weights_by_reference,
            force=force,
            lean=lean,
            bare=bare,
            extras=tuple(filter(None, extras.split(","))),
            rehearse=not no_rehearse,
            time_limit_s=time_limit,
        )
    if as_json:
        click.echo(json_line(split_json(made)))
        return
    show_plan(made.plan, made.parameters)
    if made.rehearsed:
        count = made.plan.micro_batches
        parts = f", in {count} micro-batches," if count > 1 else ""
        click.echo(f"as your own loop{parts} trains: {made.rehearsed}")
    click.echo(f"\nwrote {made.bundle}; read {made.bundle / 'README.md'}")
    verb = "train it" if made.plan.mode == "train" else "use it"
    click.echo(f"{verb}: bigbrain-fx run {made.bundle}")


@cli.command(short_help="Will it fit, and how fast? No weights, no devices.")
@click.argument("model")
@planning_options
@model_options
@click.option("-o", "--out", type=PATH, help="Write the plan to this file, for explain, simulate.")
@force_file_option
@click.option("--price", help="Of all devices by the hour, like 2.1/h: what do tokens cost?")
@json_option
def estimate(
    model: str,
    devices: Path | None,
    out: Path | None,
    force: bool,
    price: str | None,
    as_json: bool,
    time_limit: float,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Say whether MODEL fits and how fast it would train, without weights or devices."""
    from bigbrain_fx import bundles
    from bigbrain_fx.plan import telling, write_plan

    if devices is None:
        raise InputError("no devices were given", code="BX3516", help="add --devices cluster.json")
    if price is not None:
        hourly(price)
    if out is not None:
        require_absent(out, force)
    model, options = located(model, choices), chosen(choices)
    with split_warnings(), working(f"estimating {model} without weights") as say, telling(say):
        plan = bundles.estimate(model, devices, options, time_limit_s=time_limit)
    if out is not None:
        write_plan(plan, out)
    _print_plan(plan, as_json, price)
    if out is not None:
        click.echo(f"wrote {out}: bigbrain-fx explain {out}", err=True)


@cli.command(short_help="Why each cut of a plan is where it is.")
@click.argument("plan", type=PATH)
@click.option(
    "--placement", type=PATH, help="Write where each module goes to this file; `--place` reads it."
)
@force_file_option
@json_option
def explain(plan: Path, placement: Path | None, force: bool, as_json: bool) -> None:
    """Say what each device of PLAN (a bundle or plan.json) runs, and why it is cut there."""
    from bigbrain_fx.cli.console import json_line, search_json, show_explanation, show_search
    from bigbrain_fx.plan import explain as explain_plan, read_plan, write_placement

    known = read_plan(plan)
    if placement is not None:
        write_placement(known, placement, force)
        click.echo(f"wrote {placement}: edit it and give it to split --place", err=True)
    found, searched = explain_plan(known), known.search
    if as_json:
        fields = dataclasses.asdict(found)
        click.echo(json_line({**fields, "search": search_json(searched) if searched else None}))
        return
    show_explanation(found)
    if searched is not None:
        show_search(searched)


@cli.command(short_help="Forecast a plan, here or on another cluster.")
@click.argument("plan", type=PATH)
@click.option(
    "-d",
    "--devices",
    type=PATH,
    multiple=True,
    help="Another cluster.json: what would it give there? Several: a table, the cheapest first.",
)
@click.option(
    "--price", multiple=True, help="Of all devices by the hour, like 2.1/h; one for each cluster."
)
@click.option("--again", is_flag=True, help="Place the model again, for the other cluster.")
@profile_option
@failure_options
@click.option("--seed", default=0, help="With --mtbf: of the failures.")
@json_option
def simulate(
    plan: Path,
    devices: tuple[Path, ...],
    price: tuple[str, ...],
    again: bool,
    profile: Path | None,
    mtbf: str | None,
    hours: float,
    host_share: float,
    seed: int,
    as_json: bool,
) -> None:
    """Run the programs of PLAN (a bundle or plan.json) in the simulator, here or elsewhere.

    With --mtbf processes fail: it says how often to snapshot and to commit, and what share of the
    time is training.
    """
    from bigbrain_fx.bundles import simulate as simulate_plan

    if again and not devices:
        raise InputError(
            "--again is for another cluster", code="BX3517", help="add --devices cluster.json"
        )
    if len(devices) > 1:
        if mtbf is not None:
            raise InputError("--mtbf is for one cluster", code="BX3518", help="give one --devices")
        print_offers(offers(judged(plan, profile), devices, price, again=again), as_json)
        return
    found = simulate_plan(judged(plan, profile), devices[0] if devices else None, again=again)
    if mtbf is None:
        _print_plan(found, as_json, price[0] if price else None)
    else:
        print_failures(found, mtbf, hours, host_share, seed, as_json)


def judged(path: Path, profile: Path | None) -> Plan:
    """Read a plan; its ops cost what a profile of layers says, where one is given."""
    from bigbrain_fx.plan import read_plan

    plan = read_plan(path)
    return dataclasses.replace(plan, estimator=layers_of(profile) or plan.estimator)


def _print_plan(plan: Plan, as_json: bool, price: str | None = None) -> None:
    from bigbrain_fx.cli.console import json_line, plan_json, show_forecast
    from bigbrain_fx.cli.prices import cost

    paid = None if price is None else cost(plan, hourly(price))
    if as_json:
        fields = {"cost": None if paid is None else dataclasses.asdict(paid)}
        click.echo(json_line({**plan_json(plan), **fields}))
        return
    show_forecast(plan)
    if paid is not None:
        click.echo(f"at {price}: {paid}")


def hourly(text: str) -> float:
    """Read a price; see `prices`, which is loaded when there is one."""
    from bigbrain_fx.cli import prices

    return prices.hourly(text)


def offers(
    plan: Plan, devices: Sequence[Path], price: Sequence[str], *, again: bool
) -> list[Offer]:
    """Forecast a plan on each cluster; see `prices`."""
    from bigbrain_fx.cli import prices

    return prices.offers(plan, devices, price, again=again)


def print_offers(found: Sequence[Offer], as_json: bool) -> None:
    """Print a row for each cluster, or one JSON object."""
    from bigbrain_fx.cli.console import json_line, show_offers

    if as_json:
        click.echo(json_line({"offers": [dataclasses.asdict(each) for each in found]}))
    else:
        show_offers(found)
