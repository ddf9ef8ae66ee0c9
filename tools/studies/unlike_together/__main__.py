"""Everything planned together on unlike clusters, by forecast: beside pipelines and replicas.

    python -m tools.studies.unlike_together [--write results.md] [--only gpt] [--json]

Models of the size that the study `unlike` ran x speeds 2:1 and 4:2:1:1 x links of 1 Gbit/s and
100 Mbit/s; ops cost what the analytical estimator says, so that all machines forecast alike.
`auto` plans pipelines of one replica, replicas of each number without and with ZeRO 1, and all
there is. The fluid limit is all devices at the speeds that each has alone, by forecast, and nothing
sent.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path

import click

from bigbrain_fx.bundles import source_of
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, Plan, Source, fastest, make_plan
from tools.studies.emulated_models import MODELS, Site

ROOT = Path(__file__).resolve().parents[3]
ROWS = {"gpt": 16, "llama": 16, "unet": 80, "encdec": 64}
SPEEDS = ((2, 1), (4, 2, 1, 1))
MBIT_PER_S = (1000.0, 100.0)
EVERY = {**ROWS, "resnet": 64}
ENOUGH = 0.9


@dataclass(frozen=True)
class Row:
    """One model on one cluster: seconds of a step by forecast.

    Attributes:
        pipeline_s: the best pipeline of one replica.
        replicas_s: the best number of replicas, two at least; None where none can be.
        everything_s: with all left open.
        everything: what that plan is.
        fluid_s: the work divided freely, nothing sent.
        bound_s: no pipeline that divides no op is faster.
        gradients_s: in which every gradient goes over a link once, there and back at once.
        planning_s: of a processor, with all left open.
    """

    model: str
    speeds: tuple[int, ...]
    mbit_per_s: float
    pipeline_s: float
    replicas_s: float | None
    everything_s: float
    everything: str
    fluid_s: float
    bound_s: float
    gradients_s: float
    planning_s: float

    @property
    def worse(self) -> float:
        """By how much everything is slower than the best of the others; below 0: faster."""
        others = [self.pipeline_s, *([self.replicas_s] if self.replicas_s else [])]
        return self.everything_s / min(others) - 1

    @property
    def of_fluid(self) -> float:
        """The fluid limit over what was found."""
        return self.fluid_s / self.everything_s


def row_of(model: str, graph: Graph, source: Source, site: Site) -> Row:
    """Plan one model on one cluster, in every way."""
    where = site.cluster
    alone = [_best(graph, only, source, [Options("auto", tensor=1)]) for only in _each(where)]
    pipeline = _best(graph, where, source, [Options("auto", tensor=1)])
    counts = [n for n in range(2, len(where.devices) + 1) if len(where.devices) % n == 0]
    replicas = _best(graph, where, source, list(_replicas(counts)))
    start_s = time.process_time()
    plan = make_plan(graph, where, source, Options("auto", tensor=0, replicas=0))
    planning_s = time.process_time() - start_s
    assert pipeline is not None
    assert pipeline.search is not None
    held = {p.canonical: p.spec.nbytes for p in graph.params if p.spec.requires_grad}
    return Row(
        model,
        site.speeds,
        site.mbit_per_s,
        pipeline.forecast.step_s,
        replicas.forecast.step_s if replicas else None,
        plan.forecast.step_s,
        said(plan),
        1 / sum(1 / each.forecast.step_s for each in alone if each is not None),
        pipeline.search.bounds[0].step_s,
        sum(held.values()) / (site.mbit_per_s * 1e6 / 8),
        planning_s,
    )


def _replicas(counts: Sequence[int]) -> Iterator[Options]:
    for count in counts:
        yield Options("auto", tensor=1, replicas=count)
        yield Options("auto", tensor=1, replicas=count, zero_stage=1)


def _each(where: Cluster) -> Iterator[Cluster]:
    for device in where.devices:
        yield replace(where, devices=(replace(device, memory_bytes=1 << 40),))


def _best(graph: Graph, where: Cluster, source: Source, every: Sequence[Options]) -> Plan | None:
    found = []
    for options in every:
        try:
            found.append(make_plan(graph, where, source, options))
        except BigBrainError:
            continue
    return min(found, key=lambda plan: plan.forecast.step_s, default=None)


def said(plan: Plan) -> str:
    """Say in a few words what a plan is."""
    stages, count = plan.stages, len(plan.stages.devices)
    micros = [str(len(own)) for own in stages.micros]
    return ", ".join(
        filter(
            None,
            (
                f"{count} device{'s' * (count > 1)}",
                f"{stages.replicas} replicas ({':'.join(micros)})" if stages.replicas > 1 else "",
                f"groups of {stages.members}" if stages.members > 1 else "",
                f"ZeRO {stages.zero_stage}" if stages.zero_stage else "",
                f"{plan.schedule}, {plan.micro_batches}" if count > 1 else "",
            ),
        )
    )


# --------------------------------------------------------------------------- the page

_INTRO = """# Everything planned together, on unlike devices

Written by `python -m tools.studies.unlike_together --write results.md` on {day}; do not edit.
Forecasts, none of it measured: ops cost what the analytical estimator says of devices of 60 GFLOP/s
and 12 GB/s times their speeds, so plans are the same on every machine. Models are of the size of
`tools.studies.unlike`.

*Pipeline* is the best that `auto` finds of one replica, *replicas* the best number of two or more,
without and with ZeRO 1, and *everything* what it finds with replicas, tensor groups and schedules
left open; the number of micro-batches is always open. *Fluid* is all devices together at the speeds
that each has alone, with nothing sent. Where less than 90 % of it is reached the last column has
what stands in the way: the most that a pipeline which divides no op can reach, by the search's
bound; and how long every gradient takes over one link, which replicas send in each direction.
Plans within 1.2 % of each other are told apart here; `split` takes the simpler of them, and counts
a step of split backwards (`zb-v`, `auto`) as 6 % longer, since measured ones were.

{head}
"""
_HEAD = (
    "model",
    "speeds",
    "Mbit/s",
    "pipeline",
    "replicas",
    "everything",
    "which is",
    "to the best of both",
    "of fluid",
    "what stands in the way",
)


def page(rows: Sequence[Row]) -> str:
    """Return tools/studies/unlike_together."""
    lines = [_line(row) for row in rows]
    worst = max(row.worse for row in rows)
    enough = sum(row.of_fluid >= ENOUGH for row in rows)
    taken = sorted(row.planning_s for row in rows)
    end = (
        f"\nEverything against the best of both: at most {100 * worst:+.2f} %. "
        f"{enough} of {len(rows)} reach {ENOUGH:.0%} of fluid. "
        f"Planning took {taken[0]:.1f} to {taken[-1]:.1f} s of a processor.\n"
    )
    head = f"| {' | '.join(_HEAD)} |\n" + "|---" * len(_HEAD) + "|"
    return _INTRO.format(day=f"{date.today():%-d %B %Y}", head=head) + "\n".join(lines) + "\n" + end


def _line(row: Row) -> str:
    speeds = ":".join(map(str, row.speeds))
    replicas = f"{row.replicas_s:.4g}" if row.replicas_s else "-"
    cells = (
        row.model,
        speeds,
        f"{row.mbit_per_s:g}",
        f"{row.pipeline_s:.4g}",
        replicas,
        f"{row.everything_s:.4g}",
        row.everything,
        f"{100 * row.worse:+.1f} %",
        f"{row.of_fluid:.0%}",
        _limit(row),
    )
    return f"| {' | '.join(cells)} |"


def _limit(row: Row) -> str:
    if row.of_fluid >= ENOUGH:
        return ""
    return (
        f"pipelines {row.fluid_s / row.bound_s:.0%} of fluid at most; "
        f"gradients {row.gradients_s:.3g} s, fluid {row.fluid_s:.3g} s"
    )


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(EVERY)))
@click.option("--write", "out", type=click.Path(path_type=Path), help="The page to write.")
@click.option("--json", "as_json", is_flag=True)
def main(only: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Plan all cases, and show them."""
    fastest.CPU = 0.0  # of plans that are about as fast `auto` takes the simpler one: not here
    fastest.SPLIT = 1.0
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in only or EVERY:
            path = Path(scratch, f"{name}.py")
            path.write_text(MODELS[name].sized(EVERY[name]).text(str(ROOT)))
            with capture_file(path) as session:
                graph, source = session.graph, source_of(session.facts)
                for speeds, rate in product(SPEEDS, MBIT_PER_S):
                    site = Site("", speeds, rate)
                    rows.append(row_of(name, graph, source, site))
                    text = json.dumps(asdict(rows[-1])) if as_json else _line(rows[-1])
                    click.echo(text)
    if out is not None:
        out.write_text(page(rows))


if __name__ == "__main__":
    main()
