"""Every public instance x every planner: how good, how far from the bound, how long, does it fit.

    python -m tools.bench_planners --data PATH [--json] [--effort fast|normal|high]
        [--instance TEXT] [--partitioner NAME] [--time-limit SECONDS] [--unlike SEEDS]
        [--accelerators N] [--memory FACTOR] [--wires FACTOR] [--stack NODES,NODES,...]
        [--milliseconds]

PATH holds the public files (`tools.instance_files`), and perhaps `reference.json` with the best
known values. Throughput instances, and those of pipedream and piper, are judged by the largest
load; latency instances by the latency. Each planner runs in a process of its own, on one core.
`--unlike 2` adds each instance with its devices made unlike by seeds 0 and 1. `--stack 500,2000`
takes, instead, inference instances stacked until they have so many nodes. `--effort` is for
`best-load`. `--milliseconds` mends the files whose transfers are seconds beside milliseconds of
work (`tools.instance_files.transfers_in_seconds`): their rows are compared with each other and with
a bound of their own, since published values are of the files as they are.
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

from bigbrain_fx.errors import InputError, NoPlanError
from tools.instance_files import find, in_milliseconds, read, transfers_in_seconds
from tools.instances import Instance, feasible, latency, max_load, stacked, unlike, varied
from tools.load_solvers.best_load import WORK, Effort
from tools.solvers import SOLVERS, bound


@dataclass(frozen=True)
class Row:
    """One planner on one instance.

    Attributes:
        value: of the planner's placement; None: it found none, or not in time.
        best_known: published, or else the best feasible value of this run.
        bound: no placement has a smaller value: published, or by weak duality.
        ratio: value / best_known. gap: value / bound - 1.
        seconds: of planning, by the clock; `cpu_seconds` by the processor.
        proven: whether the planner says that no placement of its class is better; without a
            value: that nothing fits.
    """

    instance: str
    partitioner: str
    value: float | None
    best_known: float | None
    bound: float
    seconds: float
    feasible: bool
    cpu_seconds: float = 0.0
    ratio: float | None = None
    gap: float | None = None
    proven: bool = False
    note: str = ""


@dataclass(frozen=True)
class Wanted:
    """Which instances, and how they are changed."""

    names: Sequence[str] = ()
    unlike_seeds: int = 0
    accelerators: int | None = None
    memory: float = 1.0
    wires: float = 1.0
    stack: Sequence[int] = ()
    milliseconds: bool = False


def _numbers(_: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise click.BadParameter(f"numbers with commas between, not {text!r}") from error


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True)
@click.option("--json", "as_json", is_flag=True, help="One object a row.")
@click.option("--effort", type=click.Choice(list(WORK)), default="normal", show_default=True)
@click.option("--instance", "names", multiple=True, help="Only names that contain this.")
@click.option("--partitioner", "planners", multiple=True, type=click.Choice(list(SOLVERS)))
@click.option("--time-limit", default=600.0, show_default=True, help="Seconds for each run.")
@click.option("--unlike", "unlike_seeds", default=0, show_default=True, help="Variants of each.")
@click.option("--accelerators", type=click.IntRange(1), help="Instead of the instance's own.")
@click.option("--memory", default=1.0, help="Factor of the devices' memory.")
@click.option("--wires", default=1.0, help="Factor of the transfer times.")
@click.option("--stack", default="", callback=_numbers, help="Stacked to so many nodes.")
@click.option("--milliseconds", is_flag=True, help="Mend files whose transfers are seconds.")
def main(
    data: Path,
    as_json: bool,
    effort: Effort,
    planners: Sequence[str],
    time_limit: float,
    names: Sequence[str],
    unlike_seeds: int,
    accelerators: int | None,
    memory: float,
    wires: float,
    stack: Sequence[int],
    milliseconds: bool,
) -> None:
    """Print a row for every instance and planner."""
    rows: list[Row] = []
    wanted = Wanted(names, unlike_seeds, accelerators, memory, wires, stack, milliseconds)
    try:
        published = _published(data)
        for name, instance in _instances(data, wanted):
            each = planners or SOLVERS
            found = [measure(name, instance, p, time_limit, effort) for p in each]
            for row in compared(found, published.get(name, {})):
                rows.append(row)
                click.echo(json.dumps(asdict(row)) if as_json else _line(row))
    except InputError as error:
        click.echo(error.headline, err=True)
        raise SystemExit(2) from error
    if not as_json:
        click.echo("\n".join(_summary(rows)))


def _instances(data: Path, wanted: Wanted) -> Iterator[tuple[str, Instance]]:
    if not data.is_dir():
        raise InputError(f"no folder {data}", help="give the folder of the public planner data")
    for name, plain in _plain(data, wanted):
        changed = varied(plain, wanted.accelerators, wanted.memory, wanted.wires)
        name = name if changed is plain else f"{name}{changed.name.removeprefix(plain.name)}"
        seeds = range(wanted.unlike_seeds)
        variants = [(name, changed)]
        variants += [(f"{name}+unlike{seed}", unlike(changed, seed)) for seed in seeds]
        for key, instance in variants:
            if not wanted.names or any(text in key for text in wanted.names):
                yield key, instance


def _plain(data: Path, wanted: Wanted) -> Iterator[tuple[str, Instance]]:
    """Yield the published instances, or stacks of those of one inference pass."""
    for name, path in find(data):
        mends = wanted.milliseconds and transfers_in_seconds(name)
        if not wanted.stack and mends:
            yield f"{name}+ms", in_milliseconds(read(path))
        elif not wanted.stack:
            yield name, read(path)
        elif name.startswith("throughput/") and name.endswith("inference"):
            plain = in_milliseconds(read(path)) if mends else read(path)
            for count in wanted.stack:
                yield f"{name}+stack{count}", stacked(plain, count)


_IN_CALLS = ("allcpu", "greedy", "chain", "cpsat")
"""Methods whose published latency is of accelerators that run calls, as `latency` judges; those of
list schedules ("heft_op", "metf_op") start every op by itself, and are no yardstick for it."""


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
        best = min(entry[method] for method in _IN_CALLS if entry[method] is not None)
        bounds = [entry[key] for key in ("critpath_lb", "cpsat_lb")]
        table[f"latency/{key}"] = {"best": best, "bound": max(bounds)}
    return table


def measure(
    name: str, instance: Instance, planner: str, limit_s: float, effort: Effort = "normal"
) -> Row:
    """Run one planner in a process of its own, and judge what it returns."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    alone = name.startswith("latency/")
    process = context.Process(target=_solve, args=(instance, planner, alone, effort, there))
    start = time.monotonic()
    process.start()
    there.close()
    empty = Row(name, planner, None, None, bound(instance, alone), 0.0, feasible=False)
    try:
        if not here.poll(limit_s):
            return replace(empty, seconds=limit_s, note="out of time")
        homes, proven, low, (seconds, cpu_s), note = here.recv()
    except EOFError:
        return replace(empty, seconds=time.monotonic() - start, note="the planner crashed")
    finally:
        process.kill()
        process.join()
    if homes is None:
        return replace(empty, seconds=seconds, cpu_seconds=cpu_s, proven=proven, note=note)
    judge = latency if alone else max_load
    value, fits = judge(instance, homes), feasible(instance, homes)
    low = max(low, empty.bound)
    return replace(
        empty,
        value=value,
        bound=low,
        seconds=seconds,
        cpu_seconds=cpu_s,
        feasible=fits,
        proven=proven,
        note=note,
    )


def _solve(instance: Instance, planner: str, alone: bool, effort: Effort, out: Connection) -> None:
    _ = instance.problem, instance.group_of  # reading is not planning
    start, cpu = time.perf_counter(), time.process_time()
    homes, proven, low, note = None, False, 0.0, "no plan"
    try:
        found = SOLVERS[planner](instance, alone, effort)
        if found is not None:
            homes, proven, low, note = *found, ""
    except NoPlanError as error:
        proven, note = True, str(error.what)
    except Exception as error:  # a row says so; the other rows are still wanted
        note = f"{type(error).__name__}: {error}"
    taken = time.perf_counter() - start, time.process_time() - cpu
    out.send((homes, proven, low, taken, note))


def compared(rows: Sequence[Row], published: Mapping[str, float]) -> list[Row]:
    """Return the rows with what they are compared to."""
    values = [row.value for row in rows if row.value is not None and row.feasible]
    best = published.get("best", min(values, default=None))
    found = []
    for row in rows:
        low = max(published.get("bound", 0.0), row.bound)
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
        f"gap {100 * row.gap:6.1f} %  {row.seconds:7.2f} s ({row.cpu_seconds:.2f} s){marks}"
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
