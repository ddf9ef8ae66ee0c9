"""Which planner is better, in which scenario: quality and planning time, as one table.

    python -m tools.studies.which_planner [--write results.md] [--json]
        [--seeds 3] [--models NAME,...] [--partitioner NAME] [--profiles PROFILES.sqlite]
        [--effort normal]

Chains and branchy graphs are drawn by seeds; models are captured from models/. Every planner of the
table (and `auto`, which tries several) plans the same graph for the same cluster, and its plan is
cut, scheduled and simulated alike, so that only placements differ; quality is its step time over
the best of all. With profiles (`bigbrain-fx profile --rows 2`), plans of captured models are judged
by measured op times, and `learned` joins: chain-dp with a model fitted to the other models' ops.
"""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from math import exp, log
from pathlib import Path

import click

from bigbrain_fx.core import Graph
from bigbrain_fx.costs.fit import DEFAULT, fit
from bigbrain_fx.costs.model import PlaceRates, write_model
from bigbrain_fx.costs.profiles import ProfileStore
from bigbrain_fx.errors import BigBrainError, NoPlanError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, Plan, make_plan, plan_placed
from bigbrain_fx.planning.registry import names, options_of
from tools.studies.which_planner.scenarios import MODELS, SOURCE, Scenario, captured, synthetic

ROOT = Path(__file__).resolve().parents[3]
AUTO = "auto"
LEARNED = "learned"
_KINDS = {
    "naive": "equal shares",
    "m-topo": "fills devices by memory",
    "m-etf": "list scheduling",
    "m-sct": "list scheduling, favourite children",
    "chain-dp": "dynamic programming, three orders",
    "ideal-dp": "dynamic programming, all orders",
    "cp-sat": "constraint programming",
    "mcmc": "random walk, from chain-dp",
    "differentiable": "gradients of a soft placement",
    "mcmc+unaided": "the same, from an equal split",
    "differentiable+unaided": "the same, compared with an equal split only",
    "latency": "portfolio for one sample alone",
    "scattered": "for tests: ignores costs",
    AUTO: "several of these, and the schedule",
    LEARNED: "chain-dp with learned op times",
}


@dataclass(frozen=True)
class Row:
    """One planner in one scenario.

    Attributes:
        step_s: of its plan, simulated; None: it found none that fits, or cannot run here.
        ratio: step_s over the best of the scenario.
        seconds: to plan, with cut and simulation, on one core; capturing left out.
    """

    scenario: str
    family: str
    partitioner: str
    step_s: float | None
    seconds: float
    devices: int = 0
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Judged:
    """How plans of a scenario are judged: the estimator, and what `learned` plans with, if any."""

    estimator: str = "analytical"
    costs_file: Path | None = None


def rows_of(scenario: Scenario, planners: Iterable[str], judged: Judged, effort: str) -> list[Row]:
    """Let every planner plan a scenario; compare what the simulator says."""
    found = [_row(scenario, planner, judged, effort) for planner in planners]
    best = min((row.step_s for row in found if row.step_s is not None), default=None)
    return [
        row if row.step_s is None or not best else replace(row, ratio=row.step_s / best)
        for row in found
    ]


def _row(scenario: Scenario, planner: str, judged: Judged, effort: str) -> Row:
    start = time.process_time()
    empty = Row(scenario.name, scenario.family, planner, None, 0.0)
    try:
        plan = _planned(scenario, planner, judged, effort)
    except NoPlanError:
        return replace(empty, seconds=time.process_time() - start, note=f"found {_FITS_NOT}")
    except BigBrainError as error:
        return replace(empty, note=error.what)
    seconds = time.process_time() - start
    if planner == LEARNED:  # by what is known of the ops, and not by its own forecast
        plan = plan_placed(
            scenario.graph,
            scenario.cluster,
            SOURCE,
            Options(estimator=judged.estimator, micro_batches=scenario.micro_batches),
            plan.placement,
        )
    return replace(
        empty, step_s=plan.forecast.step_s, seconds=seconds, devices=len(plan.stages.devices)
    )


def _planned(scenario: Scenario, planner: str, judged: Judged, effort: str) -> Plan:
    learned = planner == LEARNED
    name, _, option = planner.partition("+")
    options = Options(
        partitioner="chain-dp" if learned else name,
        partitioner_options=((option, 1),) if option else (),
        estimator=LEARNED if learned else judged.estimator,
        micro_batches=scenario.micro_batches,
        effort=effort,  # type: ignore[arg-type]  # click offers the three that there are
    )
    if not learned:
        return make_plan(scenario.graph, scenario.cluster, SOURCE, options)
    with _environment({"BIGBRAIN_LEARNED_COSTS": str(judged.costs_file)}):
        return make_plan(scenario.graph, scenario.cluster, SOURCE, options)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --------------------------------------------------------------------------- profiles


def without(profiles: Path, model: str, folder: Path) -> Path:
    """Fit op times to the profiles of every other model; return the costs.json.

    Args:
        profiles: of several models.
        model: the part before the dot of the name to leave out: every op that it has.
        folder: where to write.

    Raises:
        InputError: no database, or too little is left.
    """
    store = ProfileStore(profiles, read_only=True)
    origins = store.origins()
    kept = [
        row
        for row in store.rows()
        if not any(
            name.split(".")[0] == model for name in origins.get(row[1].signature.key, frozenset())
        )
    ]
    path = folder / f"{model}.json"
    write_model(fit(kept, DEFAULT), path)
    return path


def rates_of(profiles: Path) -> PlaceRates:
    """Return the rates of the profiled machine: what a device of speed 1 has."""
    machine = ProfileStore(profiles, read_only=True).rows()[0][0]
    return PlaceRates.of(machine)


# --------------------------------------------------------------------------- the table


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table: planners down, scenarios across; mean ratio and planning seconds."""
    families = list(dict.fromkeys(row.family for row in rows))
    yield "| | " + " | ".join(families) + " |"
    yield "|---" * (len(families) + 1) + "|"
    for planner in dict.fromkeys(row.partitioner for row in rows):
        cells = [
            _cell([r for r in rows if (r.family, r.partitioner) == (f, planner)]) for f in families
        ]
        if any(cell != "–" for cell in cells):
            yield f"| `{planner}` | " + " | ".join(cells) + " |"


def _cell(rows: Sequence[Row]) -> str:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if not ratios:
        return "none fits" if any(_FITS_NOT in row.note for row in rows) else "–"
    mean = exp(sum(map(log, ratios)) / len(ratios))
    seconds = sum(row.seconds for row in rows) / len(rows)
    part = "" if len(ratios) == len(rows) else f" ({len(ratios)} of {len(rows)} fit)"
    return f"{mean:.2f}{part}, {seconds:.2g} s"


def document(rows: Sequence[Row], command: str, measured: bool) -> str:
    """Return tools/studies/which_planner."""
    judge = "measured" if measured else "analytical"
    kinds = [
        f"- `{planner}`: {_KINDS.get(planner, 'of another package')}"
        for planner in dict.fromkeys(row.partitioner for row in rows)
    ]
    absent = dict.fromkeys(r.note for r in rows if r.step_s is None and _FITS_NOT not in r.note)
    intro = (
        "Every planner plans the same graph for the same four devices and the same number of "
        "micro-batches; each plan is cut, scheduled and simulated alike. A cell is the step time "
        "over the best that any planner found in that scenario (1.00 is the best; geometric mean "
        "over the scenarios of a column), and the processor seconds that planning took. `alike` "
        "is four devices of one speed, `unlike` speeds 4:2:1:1; links are 1 Gbit/s unless the "
        "column says otherwise; `tight memory` leaves every device a twentieth more than what an "
        f"even spread of bytes needs. Captured models are judged by {judge} op times, drawn graphs "
        "by analytical ones. `auto` chooses the schedule and what is in flight as well, so what it "
        "is ahead by is not the placement's alone."
    )
    lines = textwrap.wrap(intro, 110)
    made = f"Made on {date.today():%-d %B %Y}."
    heads = (
        "# Which planner, in which scenario\n",
        f"Written by `{command}`; do not edit.",
        made,
        "",
    )
    ends = (
        "",
        *kinds,
        *(f"- Not here: {note}." for note in absent),
        "",
        "## What it says of placements, `auto` left out\n",
        *says(rows),
        "",
    )
    return "\n".join((*heads, *lines, "", *table(rows), *ends))


def says(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the figures say, column by column: the winners, and who lost by how much.

    `auto` is left out: it tries the others, and chooses more than they do.
    """
    for family in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == family and row.partitioner != AUTO]
        every = dict.fromkeys(row.partitioner for row in mine)
        means = {p: _mean([r for r in mine if r.partitioner == p]) for p in every}
        known = {p: mean for p, mean in means.items() if mean is not None}
        if not known:
            continue
        least = min(known.values())
        best = [f"`{p}`" for p, mean in known.items() if mean <= least * _EQUAL]
        behind = sorted((mean, p) for p, mean in known.items() if mean > least * _EQUAL)
        lost = ", ".join(f"`{p}` {100 * (mean / least - 1):.0f} %" for mean, p in behind)
        failed = dict.fromkeys(r.partitioner for r in mine if _FITS_NOT in r.note)
        none = f" Not always a plan that fits: {', '.join(failed)}." if failed else ""
        yield f"- **{family}**: best {', '.join(best)}; slower: {lost or 'none'}.{none}"


_EQUAL = 1.005
_FITS_NOT = "nothing that fits"


def _mean(rows: Sequence[Row]) -> float | None:
    """Return the geometric mean of the ratios; None unless every scenario was planned."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if not ratios or len(ratios) < len(rows):
        return None
    return exp(sum(map(log, ratios)) / len(ratios))


# --------------------------------------------------------------------------- the command


@click.command()
@click.option("--write", "out", type=click.Path(path_type=Path), help="The .md to write.")
@click.option("--json", "as_json", is_flag=True, help="One object a row.")
@click.option("--seeds", default=3, show_default=True, help="Drawn graphs of each shape.")
@click.option("--models", default=",".join(MODELS), show_default=True, help="Of models/, or none.")
@click.option("--partitioner", "planners", multiple=True, help="Only these.")
@click.option("--profiles", type=click.Path(path_type=Path), help="Judge captured models by these.")
@click.option("--effort", type=click.Choice(["fast", "normal", "high"]), default="normal")
def main(
    out: Path | None,
    as_json: bool,
    seeds: int,
    models: str,
    planners: Sequence[str],
    profiles: Path | None,
    effort: str,
) -> None:
    """Compare all planners in all scenarios."""
    rows: list[Row] = []
    wanted = planners or _every()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        try:
            judging = _judging(profiles, Path(scratch), stack)
            graphs = _captured([model for model in models.split(",") if model])
            rates = rates_of(profiles) if profiles else None
            for scenario in (*synthetic(seeds), *captured(graphs, rates)):
                judged = judging(scenario.model)
                every = [*wanted, *([LEARNED] if judged.costs_file and not planners else [])]
                for row in rows_of(scenario, every, judged, effort):
                    rows.append(row)
                    _show(row, as_json)
        except BigBrainError as error:
            raise click.ClickException(str(error)) from error
    if out is not None:
        command = "python -m tools.studies.which_planner --write " + str(out)
        command += " --profiles PROFILES.sqlite" if profiles else ""
        out.write_text(document(rows, command, profiles is not None))
    elif not as_json:
        click.echo("\n".join(table(rows)))


def _every() -> list[str]:
    """Return all planners, those that improve on chain-dp also without it, and auto."""
    found = [name for name in names("partitioner") if name not in _NOT_SHOWN]
    alone = [f"{n}+unaided" for n in found if "unaided" in options_of("partitioner", n)]
    return [*found, *alone, AUTO]


_NOT_SHOWN = frozenset({"scattered", AUTO})


def _judging(profiles: Path | None, scratch: Path, stack: ExitStack) -> Callable[[str], Judged]:
    """Return how to judge a scenario, by its captured model ("": a drawn graph)."""
    if profiles is None:
        return lambda model: Judged()
    stack.enter_context(_environment({"BIGBRAIN_PROFILES": str(profiles.resolve())}))
    known: dict[str, Judged] = {"": Judged()}

    def judged(model: str) -> Judged:
        if model not in known:
            known[model] = Judged("measured", without(profiles, model, scratch))
        return known[model]

    return judged


def _captured(models: Iterable[str]) -> dict[str, Graph]:
    found = {}
    for model in models:
        with capture_file(ROOT / "models" / f"{model}.py") as session:
            found[model] = session.graph
    return found


def _show(row: Row, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(row)))
        return
    value = row.note if row.step_s is None else f"{row.step_s:.4g} s a step, {row.ratio:.3f}"
    click.echo(f"{row.scenario:36s} {row.partitioner:15s} {value} ({row.seconds:.2f} s)", err=True)


if __name__ == "__main__":
    main()
