"""Commands: fit, doctor, profile: what a host does, measured and learned."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from bigbrain_fx.cli.command import reads
from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.option_values import located, read_members
from bigbrain_fx.cli.options import (
    COUNT,
    GIVEN,
    PATH,
    capture_options,
    force_file_option,
    json_option,
    model_options,
    option,
    require_absent,
)
from bigbrain_fx.cli.output import emit
from bigbrain_fx.cli.progress import working
from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from bigbrain_fx.measure import HostProbe, Survey

Result: TypeAlias = tuple[dict[str, object], list[str]]  # what --json prints, and lines of text


@cli.command(short_help="Fit op times to profiles, for the estimator `learned`.")
@click.argument("profiles", type=PATH)
@option("--model", help="One of linear, boosting  [default: boosting].")
@option(
    "--base",
    metavar="FILE",
    help="Correct this model by the few ops of PROFILES, instead of fitting one: a file of `fit`, "
    "or `shipped`.",
)
@option("-o", "--out", default="costs.json", type=PATH, help="The file to write.")
@force_file_option
@json_option
def fit(
    profiles: Path,
    model: str | None,
    base: str | None,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Fit a model of op times to PROFILES, which `profile` wrote.

    The file is plain JSON. The error it prints is of ops that were left out of a fit, a fifth of
    them at a time, or with --base each. To use it: BIGBRAIN_LEARNED_COSTS=costs.json and
    --estimator learned.
    """
    require_absent(out, force)
    if base is not None and model is not None:
        raise InputError("--model fits a model, --base corrects one", code="BX3513")
    if base is None:
        facts, lines = _fitted(profiles, model, out)
    else:
        facts, lines = _corrected(profiles, base, out)
    use = f"wrote {out}; use it: BIGBRAIN_LEARNED_COSTS={out} and --estimator learned"
    emit(as_json, {**facts, "wrote": str(out)}, "\n".join([*lines, use]))


def _fitted(profiles: Path, model: str | None, out: Path) -> Result:
    from bigbrain_fx.costs import DEFAULT, fit_file

    model = model or DEFAULT
    with working(f"fitting {model} to {profiles}"):
        found = fit_file(profiles, out, model)
    missing = "too little was measured of the phase {}: it stays as analytical has it"
    names = ("machines", "times", "missing", "mape", "median")
    return {"model": model, **{name: getattr(found, name) for name in names}}, [
        f"{model} of {found.times} times on {'; '.join(found.machines)}",
        *map(missing.format, found.missing),
        f"error on unseen ops: mean {found.mape:.1%}, median {found.median:.1%}",
    ]


def _corrected(profiles: Path, base: str, out: Path) -> Result:
    from bigbrain_fx.costs import correct_file

    with working(f"correcting {base} by {profiles}"):
        found = correct_file(profiles, base, out)
    times = 2.0**found.model.correction.device
    facts = {"base": base, "machine": found.machine, "ops": found.ops, "times": times}
    useless = "these ops correct nothing: the base holds here as it is"
    return {**facts, "before": found.before, "after": found.after}, [
        f"{base} corrected by {found.ops} ops of {found.machine}: {times:.2f} times the base",
        f"median error of these ops: {found.before:.1%} before, {found.after:.1%} now, each "
        "forecast without itself",
        *([useless] if found.after >= found.before else []),
    ]


@cli.command(short_help="Measure this host; write its cluster.json.")
@option("--write", "out", type=PATH, help="Write a cluster.json of this host.")
@option("--devices", type=COUNT, default=2, help="How many devices to describe.")
@option("--threads", type=COUNT, default=1, help="Threads of each CPU device.")
@option(
    "--kind",
    type=click.Choice(["cpu", "cuda"]),
    help="What the devices are [default: GPUs where there are enough of them, else the CPU].",
)
@option("--thorough", is_flag=True, help="Measure longer.")
@option(
    "--hosts",
    metavar="A,B,...",
    callback=reads("read_names", GIVEN),
    help="Measure these hosts, by ssh, and the links between them; --devices is of each.",
)
@option(
    "--python",
    metavar="PATH",
    default=sys.executable,
    show_default=False,
    help="With --hosts: the Python there that has bigbrain-fx [default: the path of this one].",
)
@option(
    "--port",
    type=click.IntRange(1, 65535),
    default=29500,
    help="With --hosts: where all meet on the first of them.",
)
@force_file_option
@json_option
def doctor(
    out: Path | None,
    force: bool,
    hosts: tuple[str, ...],
    python: str,
    port: int,
    as_json: bool,
    **how: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Probe this host: memory, matrix-multiply rate, memory bandwidth, loopback, GPUs.

    GPUs are measured all at once, by a process each, and so is the link of every pair; with --kind
    cpu they are left alone. With --json the cluster has one field more, "measured": matrix products
    by size and dtype, and every other figure before it was rounded.
    """
    from bigbrain_fx.measure import Hosts, probe, survey_hosts

    require_absent(out, force)
    there = Hosts(hosts, python, port)
    how["quick"] = not how.pop("thorough")
    found: HostProbe | Survey
    with working(f"probing {', '.join(hosts) or 'this host'}"):
        if hosts:
            found = survey_hosts(there, **{**how, "kind": how["kind"] or "cpu"})
        else:
            found = probe(**how)
    _print_probe(found, as_json)
    if out is not None:
        found.write(out, force=force)
        click.echo(f"wrote {out}", err=True)


def _print_probe(found: HostProbe | Survey, as_json: bool) -> None:
    from bigbrain_fx.cluster import to_json as cluster_json

    described = json.loads(cluster_json(found.cluster))
    click.echo(json.dumps({**described, "measured": found.measured}) if as_json else str(found))


@cli.command(short_help="Measure a model's ops on this host.")
@click.argument("model", required=False)
@option("--db", type=PATH, required=True, help="The profile database; made if it is not there.")
@option(
    "--merge",
    multiple=True,
    type=PATH,
    help="First take over the profiles of this database, of another host, say.",
)
@option(
    "--rows",
    metavar="N,...",
    callback=reads("read_rows", GIVEN),
    help="Rows of a micro-batch, each of them [default: the example batch's].",
)
@option("--threads", type=COUNT, default=1, help="Threads to compute with.")
@option(
    "--device",
    default="auto",
    help="cpu, cuda, cuda:1, or auto: the first GPU if there is one, else the CPU.",
)
@option("--rounds", type=COUNT, default=20, help="Runs of the model for each number of rows.")
@option(
    "--tensor-parallel",
    type=COUNT,
    help="Measure the ops of each rank of a tensor-parallel group of so many devices, too.",
)
@option(
    "--tp-ratio",
    metavar="3:1",
    help="Split within the group [default: equal].",
)
@option(
    "--tp-axes",
    metavar="heads,hidden",
    callback=reads("read_axes", GIVEN),
    help="Axes that the group splits [default: all possible].",
)
@capture_options
@model_options
@json_option
def profile(
    model: str | None,
    db: Path,
    merge: tuple[Path, ...],
    as_json: bool,
    tensor: int | None,
    tensor_shares: str | None,
    mode: str | None,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Measure the distinct ops of MODEL on a device of this host, for the estimator `measured`.

    What the database has already is not measured again: run it again to go on. With --merge MODEL
    may be left out; without either it is a model of some twenty dear ops, for `fit --base`.
    """
    _merge(merge, db, as_json)
    if model is None and merge:
        return
    from bigbrain_fx.measure import TWENTY_OPS, ProfileOptions, profile as measure

    model = model or str(TWENTY_OPS)
    place, how = located(model, choices), {"time_limit_s": choices.pop("time_limit")}
    shares = read_members(tensor, tensor_shares)
    options = ProfileOptions(**choices, **how, training=mode != "eval", tensor_shares=shares)
    with working(f"profiling {model}") as show:
        found = measure(place, db, options, show)
    for entry in found.measured:
        facts = {**dataclasses.asdict(entry), "agreement": entry.agreement}
        emit(as_json, facts | {"model": found.model, "machine": found.machine}, str(entry))
    if not as_json:
        click.echo(f"{found.model} on {found.machine}; see {db}")


def _merge(others: tuple[Path, ...], db: Path, as_json: bool) -> None:
    from bigbrain_fx.costs import ProfileStore

    for other in others:
        taken = ProfileStore(db).merge(other)
        facts = {"merged": str(other), "profiles": taken}
        emit(as_json, facts, f"took over {taken} profiles of {other}")
