"""Every public instance x every planner: how good, how far from the bound, how long, does it fit.

    python -m tools.bench_planners --data PATH [--json] [--instance TEXT] [--partitioner NAME]
        [--time-limit SECONDS] [--unlike SEEDS]

PATH holds the public files (`tools.instance_files`), and perhaps `reference.json` with the best
known values. Throughput instances, and those of pipedream and piper, are judged by the largest
load; latency instances by the latency. Each planner runs in a process of its own, on one core.
`--unlike 2` adds each instance with its devices made unlike by seeds 0 and 1.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from tools.instance_files import find, read
from tools.instances import Instance, feasible, latency, max_load, unlike
from tools.solvers import SOLVERS, bound


@dataclass(frozen=True)
class Row:
    """One planner on one instance.

    Attributes:
        value: of the planner's placement; None: it found none, or not in time.
        best_known: published, or else the best feasible value of this run.
        bound: no placement has a smaller value: published, or by weak duality.
        ratio: value / best_known. gap: value / bound - 1.
        proven: whether the planner says that no placement of its class is better.
    """

    instance: str
    partitioner: str
    value: float | None
    best_known: float | None
    bound: float
    seconds: float
    feasible: bool
    ratio: float | None = None
    gap: float | None = None
    proven: bool = False
    note: str = ""


@click.command()
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True
)
@click.option("--json", "as_json", is_flag=True, help="One object a row.")
@click.option("--instance", "wanted", multiple=True, help="Only names that contain this.")
@click.option("--partitioner", "planners", multiple=True, type=click.Choice(list(SOLVERS)))
@click.option("--time-limit", default=600.0, show_default=True, help="Seconds for each run.")
@click.option("--unlike", "seeds", default=0, show_default=True, help="Variants of each instance.")
def main(
    data: Path,
    as_json: bool,
    wanted: Sequence[str],
    planners: Sequence[str],
    time_limit: float,
    seeds: int,
) -> None:
    """Print a row for every instance and planner."""
    published = _published(data)
    rows: list[Row] = []
    for name, instance in _instances(data, wanted, seeds):
        found = [measure(name, instance, p, time_limit) for p in planners or SOLVERS]
        for row in compared(found, published.get(name, {})):
            rows.append(row)
            click.echo(json.dumps(asdict(row)) if as_json else _line(row))
    if not as_json:
        click.echo("\n".join(_summary(rows)))


def _instances(data: Path, wanted: Sequence[str], seeds: int) -> Iterator[tuple[str, Instance]]:
    for name, path in find(data):
        plain = read(path)
        variants = [(name, plain)]
        variants += [(f"{name}+unlike{seed}", unlike(plain, seed)) for seed in range(seeds)]
        for key, instance in variants:
            if not wanted or any(text in key for text in wanted):
                yield key, instance


def _published(data: Path) -> Mapping[str, Mapping[str, float]]:
    """Return the best known value and bound of each instance that `reference.json` lists."""
    file = data / "reference.json"
    if not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    table: dict[str, Mapping[str, float]] = {}
    for key, entry in found.get("throughput", {}).items():
        table[f"throughput/{key}"] = {"best": entry["best_known"], "bound": entry["lower_bound"]}
    for key, entry in found.get("latency", {}).items():
        methods = ("allcpu", "greedy", "chain", "cpsat", "heft_op", "metf_op")
        best = min(entry[method] for method in methods if entry[method] is not None)
        bounds = [entry[key] for key in ("critpath_lb", "cpsat_lb")]
        table[f"latency/{key}"] = {"best": best, "bound": max(bounds)}
    return table


def measure(name: str, instance: Instance, planner: str, limit_s: float) -> Row:
    """Run one planner in a process of its own, and judge what it returns."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    alone = name.startswith("latency/")
    process = context.Process(target=_solve, args=(instance, planner, alone, there))
    start = time.monotonic()
    process.start()
    there.close()
    empty = Row(name, planner, None, None, bound(instance, alone), 0.0, feasible=False)
    try:
        if not here.poll(limit_s):
            return replace(empty, seconds=limit_s, note="out of time")
        homes, proven, seconds, note = here.recv()
    except EOFError:
        return replace(empty, seconds=time.monotonic() - start, note="the planner crashed")
    finally:
        process.kill()
        process.join()
    if homes is None:
        return replace(empty, seconds=seconds, note=note)
    judge = latency if alone else max_load
    value, fits = judge(instance, homes), feasible(instance, homes)
    return replace(empty, value=value, seconds=seconds, feasible=fits, proven=proven, note=note)


def _solve(instance: Instance, planner: str, alone: bool, out: Connection) -> None:
    _ = instance.problem, instance.group_of  # reading is not planning
    start = time.perf_counter()
    try:
        found = SOLVERS[planner](instance, alone)
        homes, proven, note = (None, False, "no plan") if found is None else (*found, "")
    except Exception as error:  # a row says so; the other rows are still wanted
        homes, proven, note = None, False, f"{type(error).__name__}: {error}"
    out.send((homes, proven, time.perf_counter() - start, note))


def compared(rows: Sequence[Row], published: Mapping[str, float]) -> list[Row]:
    """Return the rows with what they are compared to."""
    values = [row.value for row in rows if row.value is not None and row.feasible]
    best = published.get("best", min(values, default=None))
    found = []
    for row in rows:
        low = published.get("bound", row.bound)
        ratio = row.value / best if row.value is not None and best else None
        gap = row.value / low - 1 if row.value is not None and low else None
        found.append(replace(row, best_known=best, bound=low, ratio=ratio, gap=gap))
    return found


def _line(row: Row) -> str:
    if row.value is None or row.ratio is None or row.gap is None:
        return f"{row.instance:48s} {row.partitioner:10s} {row.note} ({row.seconds:.2f} s)"
    marks = ("" if row.feasible else " INFEASIBLE") + (" proven" if row.proven else "")
    return (
        f"{row.instance:48s} {row.partitioner:10s} {row.value:11.4f}  x best {row.ratio:6.4f}  "
        f"gap {100 * row.gap:6.1f} %  {row.seconds:7.2f} s{marks}"
    )


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield, for each planner, its geometric mean over the best known, where it fits."""
    by_planner: dict[str, list[Row]] = {}
    for row in rows:
        by_planner.setdefault(row.partitioner, []).append(row)
    yield ""
    for planner, each in by_planner.items():
        ratios = [row.ratio for row in each if row.ratio is not None and row.feasible]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            worst = max(row.seconds for row in each)
            yield (
                f"{planner:10s} {len(ratios)} of {len(each)} feasible, geometric mean of value / "
                f"best known {mean:.4f}, at most {worst:.1f} s"
            )


if __name__ == "__main__":
    main()
