"""Forecast steps of all models on a handful of clusters: one table, before and after a change.

    python -m tools.plans_table [--json FILE] [--before FILE --write docs/plans.md]
        [--models NAME,...] [--partitioner NAME ...]

Every model of models/ is planned for every cluster with 8 micro-batches: by `analytical`, which is
chain-dp, by chain-dp with cuts inside layers at no penalty, and by `auto`. Ops cost what the
analytical estimator says of devices of 20 GFLOP/s (times a speed). Plans, and so forecasts, are the
same on every machine. `--json` keeps the rows; `--before` reads rows of an earlier state, and the
table then has both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path

import click

from bigbrain_fx.core import Cluster, Device, Graph, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.planning.registry import preset

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("gpt", "llama", "unet", "resnet", "encdec", "moe", "digits")
ANYWHERE = "chain-dp, cuts anywhere"
PLANNERS = ("analytical", ANYWHERE, "auto")
MICRO_BATCHES = 8
_GIB = 2**30
_GIGABIT, _FAST_ETHERNET = Link(1e-4, 125e6), Link(1e-4, 12.5e6)
_TEN_GIGABIT = Link(2e-5, 1.25e9)
_PATH = (3, 0, 6, 1, 4, 7, 2, 5)
"""Along which the links of the last cluster are fast; its devices are listed by name."""


@dataclass(frozen=True)
class Row:
    """One plan; `step_s` is None where none fits. `plan_s` are processor seconds."""

    model: str
    cluster: str
    partitioner: str
    step_s: float | None
    devices: int
    plan_s: float

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is a plan of."""
        return self.model, self.cluster, self.partitioner


def clusters() -> Mapping[str, Cluster]:
    """Return the clusters by name, CPU devices of a host each."""
    names = [f"d{i}" for i in range(len(_PATH))]
    fast = tuple((names[a], names[b], _GIGABIT) for a, b in pairwise(_PATH))
    return {
        "2 alike": Cluster(_devices(1, 1), _GIGABIT),
        "2:1": Cluster(_devices(2, 1), _GIGABIT),
        "4:2:1:1": Cluster(_devices(4, 2, 1, 1), _GIGABIT),
        "4:2:1:1, 100 Mbit/s": Cluster(_devices(4, 2, 1, 1), _FAST_ETHERNET),
        "4:2:1:1, 10 Gbit/s": Cluster(_devices(4, 2, 1, 1), _TEN_GIGABIT),
        "8 alike, a fast path": Cluster(_devices(*[1] * 8), _FAST_ETHERNET, fast),
    }


def _devices(*speeds: float) -> tuple[Device, ...]:
    return tuple(
        Device(f"d{i}", f"h{i}", "cpu", 64 * _GIB, s * 20e9, s * 12e9, 5e-6 / s)
        for i, s in enumerate(speeds)
    )


def rows(models: Iterable[str], planners: Sequence[str]) -> Iterator[Row]:
    """Plan everything; a model is captured once."""
    for model in models:
        with capture_file(ROOT / "models" / f"{model}.py") as session:
            graph = session.graph
        for name, cluster in clusters().items():
            for planner in planners:
                yield _row(model, graph, name, cluster, planner)


def _row(model: str, graph: Graph, name: str, cluster: Cluster, planner: str) -> Row:
    method, estimator = preset("analytical" if planner == ANYWHERE else planner)
    chosen = (("block_gap", 0),) if planner == ANYWHERE else ()
    options = Options(method, estimator, None, MICRO_BATCHES, partitioner_options=chosen)
    start_s = time.process_time()
    try:
        plan = make_plan(graph, cluster, Source(model), options)
    except NoPlanError:
        return Row(model, name, planner, None, 0, time.process_time() - start_s)
    taken_s = time.process_time() - start_s
    return Row(model, name, planner, plan.forecast.step_s, len(plan.stages.devices), taken_s)


# --------------------------------------------------------------------------- the table


def table(after: Sequence[Row], before: Sequence[Row]) -> Iterator[str]:
    """Yield Markdown: a line for each model and cluster; before, after and the change of each."""
    planners = list(dict.fromkeys(row.partitioner for row in after))
    known = {row.key: row for row in before}
    heads = [f"{p}, before | after | change" if known else p for p in planners]
    columns = 2 + len(planners) * (3 if known else 1)
    yield f"| model | cluster | {' | '.join(heads)} |"
    yield "|" + "---|" * columns
    cells: dict[tuple[str, str], list[str]] = {}
    for row in after:
        line = cells.setdefault((row.model, row.cluster), [])
        line += _compared(known.get(row.key), row) if known else [_step(row)]
    for (model, cluster), line in cells.items():
        yield f"| {model} | {cluster} | {' | '.join(line)} |"


def _compared(before: Row | None, after: Row) -> list[str]:
    if before is None:
        return ["–", _step(after), "new"]
    if before.step_s is None or after.step_s is None:
        return [_step(before), _step(after), "–"]
    return [_step(before), _step(after), f"{100 * (after.step_s / before.step_s - 1):+.1f} %"]


def _step(row: Row) -> str:
    return "none fits" if row.step_s is None else f"{1e3 * row.step_s:.2f} ms on {row.devices}"


def summary(after: Sequence[Row], before: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each planner: how its steps changed, and how long planning took."""
    known = {row.key: row for row in before}
    for planner in dict.fromkeys(row.partitioner for row in after):
        mine = [row for row in after if row.partitioner == planner]
        took_s = sum(row.plan_s for row in mine)
        pairs = [(known[r.key].step_s, r.step_s) for r in mine if r.key in known]
        ratios = [after_s / before_s for before_s, after_s in pairs if before_s and after_s]
        text = f"- `{planner}`: {len(mine)} plans"
        if ratios:
            faster, slower = sum(r < 0.9995 for r in ratios), sum(r > 1.0005 for r in ratios)
            before_s = sum(known[r.key].plan_s for r in mine if r.key in known)
            text += (
                f"; faster {faster}, slower {slower}; step times x {min(ratios):.3f} to "
                f"x {max(ratios):.3f}; planned in {before_s:.1f} s before and {took_s:.1f} s now"
            )
        yield text + "."


def document(after: Sequence[Row], before: Sequence[Row]) -> str:
    """Return docs/plans.md."""
    intro = (
        "# Plans of all models, before and after\n\n"
        "Written by `python -m tools.plans_table --before FILE --write docs/plans.md`; do not "
        f"edit.\nMade on {date.today():%-d %B %Y}.\n\nForecast step (and devices in use) of "
        "every model of `models/` with "
        f"{MICRO_BATCHES} micro-batches,\non CPU devices of 20 GFLOP/s times the speeds in a "
        "cluster's name; links are 1 Gbit/s unless it says\notherwise. `a fast path`: eight "
        "devices, listed by name, whose 1 Gbit/s links form one path among\nlinks of 100 Mbit/s. "
        "`analytical` is the default, chain-dp.\n"
    )
    return "\n".join((intro, *table(after, before), "", *summary(after, before), ""))


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--partitioner", "planners", multiple=True, default=PLANNERS, show_default=True)
@click.option("--json", "kept", type=click.Path(path_type=Path), help="Keep the rows here.")
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="Rows to compare to.")
@click.option("--write", "out", type=click.Path(path_type=Path), help="The .md to write.")
def main(
    models: str, planners: Sequence[str], kept: Path | None, before: Path | None, out: Path | None
) -> None:
    """Plan all models for all clusters."""
    found = []
    for row in rows(models.split(","), planners):
        click.echo(f"{row.model:8} {row.cluster:22} {row.partitioner:10} {_step(row)}", err=True)
        found.append(row)
    if kept is not None:
        kept.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    earlier = [Row(**entry) for entry in json.loads(before.read_text())] if before else []
    if out is not None:
        out.write_text(document(found, earlier))
    else:
        click.echo("\n".join((*table(found, earlier), "", *summary(found, earlier))))


if __name__ == "__main__":
    main()
