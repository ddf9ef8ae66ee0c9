"""How long planners take on large graphs, on one core, capturing left out; and how far they end.

    python -m tools.studies.which_planner.time_planners [--ops 500,2000,10000] [--partitioner NAME]
        [--effort fast] [--json]

The graphs are a captured GPT with one of its blocks repeated (`stacked_graph`), on four unlike
devices with unlike links. A row has the processor seconds of planning alone (partitioning,
cut, schedule, simulation: the whole way to a plan), the forecast step, and its gap to `auto`'s
lower bound for every plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, make_plan
from bigbrain_fx.plan.search import Effort
from tools.studies.which_planner.scenarios import SOURCE, cluster_of
from tools.studies.which_planner.stacked_graph import stacked

ROOT = Path(__file__).resolve().parents[3]
PLANNERS = ("chain-dp", "ideal-dp", "m-topo", "m-etf", "m-sct", "auto")
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Row:
    """One planner on one graph; `seconds` are of the wall clock, `cpu_seconds` of the processor.

    `value` and `bound` are seconds of a step; `feasible`: a plan that fits was found.
    """

    instance: str
    ops: int
    partitioner: str
    value: float | None
    bound: float | None
    gap: float | None
    seconds: float
    cpu_seconds: float
    feasible: bool
    note: str = ""


def devices() -> Cluster:
    """Return four devices of speeds 4:2:1:1; the last is behind a link of a tenth of the rate."""
    plain = cluster_of("unlike", "10 Gbit/s")
    last = plain.devices[-1].name
    slow = Link(1e-4, 125e6)
    links = tuple((device.name, last, slow) for device in plain.devices[:-1])
    return replace(plain, links=links)


def measure(graph: Graph, planner: str, effort: Effort, bound_s: float | None) -> Row:
    """Plan once; `bound_s` where `auto` has given it already."""
    start, cpu = time.perf_counter(), time.process_time()
    options = Options(partitioner=planner, micro_batches=MICRO_BATCHES, effort=effort)
    note, step_s = "", None
    try:
        plan = make_plan(graph, devices(), SOURCE, options)
        step_s = plan.forecast.step_s
        if plan.search is not None:
            bound_s = plan.search.bounds[0].step_s if plan.search.bounds else None
    except BigBrainError as error:
        note = error.what
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    gap = step_s / bound_s - 1 if step_s and bound_s else None
    name, count = graph.name, len(graph.ops)
    return Row(name, count, planner, step_s, bound_s, gap, seconds, cpu_s, step_s is not None, note)


@click.command()
@click.option("--ops", default="500,2000,10000", show_default=True, help="Sizes of the graphs.")
@click.option("--partitioner", "planners", multiple=True, help="Only these.")
@click.option("--effort", type=click.Choice(["fast", "normal", "high"]), default="fast")
@click.option("--json", "as_json", is_flag=True, help="One object a row.")
def main(ops: str, planners: Sequence[str], effort: Effort, as_json: bool) -> None:
    """Plan every graph by every planner."""
    with capture_file(ROOT / "models" / "gpt.py") as session:
        graph = session.graph
    for count in map(int, ops.split(",")):
        large = stacked(graph, count)
        wanted = planners or PLANNERS
        bound_s = None
        for planner in sorted(wanted, key=lambda name: name != "auto"):  # it gives the bound
            row = measure(large, planner, effort, bound_s)
            bound_s = row.bound if bound_s is None else bound_s
            click.echo(json.dumps(asdict(row)) if as_json else _line(row))


def _line(row: Row) -> str:
    head = f"{row.ops:6d} ops  {row.partitioner:10s}"
    if row.value is None:
        return f"{head} {row.note}"
    gap = "" if row.gap is None else f"  within {100 * row.gap:.1f} % of the bound"
    return f"{head} {row.value:.4g} s a step{gap}  {row.cpu_seconds:.2f} s ({row.seconds:.2f} s)"


if __name__ == "__main__":
    main()
