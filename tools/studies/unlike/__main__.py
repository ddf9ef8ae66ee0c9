"""`auto` against the naive split on emulated unlike clusters, measured.

    python -m tools.studies.unlike --out rows.jsonl [--only gpt] [--pairs 3] [--steps 4] [--json]
    python -m tools.studies.unlike --out halves.jsonl --against whole [--share 0.6]
    python -m tools.studies.unlike --out cuts.jsonl --every-cut gpt

Linux and root. Models x speeds 2:1 and 4:2:1:1 x links of 1 Gbit/s and 100 Mbit/s, 8 micro-batches.
Both plans are made from measured ops and a surveyed cluster, and run in turns. The limit of a case
is the naive split's forecast over the search's lower bound: for pipelines (sum of speeds, bubble,
links), and for any plan at all. Beside them stands what freely divisible work on links without cost
would give.

`--against whole` runs what `auto` finds with whole backwards in place of the naive split: what
split backwards give. Its limit is of whole backwards. Of the speeds 4:2:1:1 all devices together
take this machine's two cores, if the fastest has one, and what carries messages waits for them:
with `--share 0.6` they leave it the rest.

`--every-cut` runs all cuts of a model in two, in order of their ops, whose forecast is within 20 %
of the best, and says by how much the plan of `auto` is slower than the best of them.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path

import click
import torch

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import RunOptions
from bigbrain_fx.core import Cluster, Placement
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.plan import Options, Plan, make_plan, plan_placed
from bigbrain_fx.planning.registry import load
from bigbrain_fx.planning.units import units
from tools.studies.emulated_models import MODELS, Site
from tools.studies.emulation import Network, emulated

PATH = click.Path(path_type=Path)
ROOT = Path(__file__).resolve().parents[3]
MICRO_BATCHES = 8
ROWS = {"gpt": 16, "llama": 16, "unet": 80, "encdec": 64}
SPEEDS = ((2, 1), (4, 2, 1, 1))
MBIT_PER_S = (1000.0, 100.0)
NEAR = 1.2  # of the best forecast: cuts beyond are not run


@dataclass(frozen=True)
class Case:
    """A model on a cluster; seconds of a step, of each plan and run."""

    model: str
    speeds: tuple[int, ...]
    mbit_per_s: float
    naive_s: tuple[float, ...]
    auto_s: tuple[float, ...]
    naive_forecast_s: float
    auto_forecast_s: float
    bound_s: float
    auto: str

    @property
    def faster(self) -> float:
        """How many times faster `auto` is, as measured."""
        return statistics.median(self.naive_s) / statistics.median(self.auto_s)

    @property
    def limit(self) -> float:
        """How many times faster any plan could be, by forecast."""
        return self.naive_forecast_s / self.bound_s

    @property
    def key(self) -> tuple[object, ...]:
        """What it is a case of."""
        return self.model, tuple(self.speeds), self.mbit_per_s

    def __str__(self) -> str:
        speeds = ":".join(map(str, self.speeds))
        return (
            f"{self.model:7s} {speeds:8s} {self.mbit_per_s:5g} Mbit/s  {self.faster:5.2f}x measured"
            f"  {self.naive_forecast_s / self.auto_forecast_s:5.2f}x forecast"
            f"  {self.limit:5.2f}x limit  {100 * self.faster / self.limit:4.0f} % of it"
            f"  (freely divisible {free_limit(self.speeds):4.2f}x)"
            f"  {self.auto}"
        )


def free_limit(speeds: Sequence[int], micro_batches: int = MICRO_BATCHES) -> float:
    """Return naive over best for work that divides freely and links that cost nothing.

    A step of a chain takes the sum over stages, and (M - 1) times the slowest.
    """
    naive = [1 / len(speeds) / speed for speed in speeds]
    even = [1 / sum(speeds)] * len(speeds)
    taken = [sum(each) + (micro_batches - 1) * max(each) for each in (naive, even)]
    return taken[0] / taken[1]


@dataclass
class Models:
    """The models, captured and profiled when they are first asked for."""

    work: Path
    stack: ExitStack
    sessions: dict[str, CaptureSession]

    def session(self, name: str) -> CaptureSession:
        """Return a model's capture; its ops for a micro-batch are in the profile database."""
        if name not in self.sessions:
            path = self.work / f"{name}.py"
            path.write_text(MODELS[name].sized(ROWS[name]).text(str(ROOT)))
            store = Path(os.environ["BIGBRAIN_PROFILES"])
            profile(path, store, ProfileOptions(rows=(ROWS[name] // MICRO_BATCHES,), device="cpu"))
            self.sessions[name] = self.stack.enter_context(capture_file(path))
        return self.sessions[name]


def planned(session: CaptureSession, cluster: Cluster, how: str) -> Plan:
    """Plan a model from measured ops: "naive", "auto", or "whole": auto with whole backwards."""
    if how == "naive":
        options = Options(how, "measured", "1f1b", MICRO_BATCHES)
    else:
        defer = () if how == "whole" else None
        options = Options("auto", "measured", None, MICRO_BATCHES, defer=defer, tensor=1)
    return make_plan(session.graph, cluster, source_of(session.facts), options)


def measured(
    net: Network, session: CaptureSession, plans: Sequence[Plan], rounds: int, steps: int
) -> list[tuple[float, ...]]:
    """Run plans in turns; return the median step of each run, plan by plan."""
    taken: list[list[float]] = [[] for _ in plans]
    with tempfile.TemporaryDirectory(prefix="unlike-") as folder:
        bundles = [
            write_bundle(plan, session, Path(folder, str(n))) for n, plan in enumerate(plans)
        ]
        for turn, (n, bundle) in product(range(rounds), enumerate(bundles)):
            logs = Path(folder, f"logs-{turn}-{n}")
            run = net.run(bundle, RunOptions(steps=1 + steps, threads=1, logs=logs))
            taken[n].append(statistics.median(line.step_s for line in run.steps[1:]))
    return [tuple(each) for each in taken]


def compared(
    net: Network,
    cluster: Cluster,
    models: Models,
    name: str,
    site: Site,
    pairs: int,
    steps: int,
    against: str,
) -> Case:
    """Plan both ways, run both."""
    session = models.session(name)
    naive, auto = (planned(session, cluster, how) for how in (against, "auto"))
    assert auto.search is not None
    naive_s, auto_s = measured(net, session, (naive, auto), pairs, steps)
    in_flight = f", in flight {auto.in_flight}" if auto.in_flight else ""
    return Case(
        name,
        site.speeds,
        site.mbit_per_s,
        naive_s,
        auto_s,
        naive.forecast.step_s,
        auto.forecast.step_s,
        auto.search.bounds[0].step_s,
        f"{auto.schedule} on {len(auto.stages.devices)}{in_flight}",
    )


# --------------------------------------------------------------------------- every cut


def every_cut(session: CaptureSession, cluster: Cluster) -> Iterator[Plan]:
    """Yield a plan for each cut of the ops' order in two that fits and is a chain."""
    graph = session.graph.at(session.graph.batch // MICRO_BATCHES)
    found = units(graph)
    first, second = (device.name for device in cluster.devices)
    options = Options("cut", "measured", "1f1b", MICRO_BATCHES)
    for end in range(1, len(found.groups)):
        homes = dict.fromkeys(found.replicated, first)
        for number, group in enumerate(found.groups):
            homes |= dict.fromkeys(group, first if number < end else second)
        place = Placement(homes, f"cut before unit {end}")
        try:
            plan = plan_placed(session.graph, cluster, source_of(session.facts), options, place)
        except NoPlanError:
            continue
        if plan.stages.is_chain:
            yield plan


def near_best(plans: Sequence[Plan], near: float = NEAR) -> list[Plan]:
    """Return those whose forecast is near the best, of equal forecasts one."""
    best_s = min(plan.forecast.step_s for plan in plans)
    by_time = {round(plan.forecast.step_s, 6): plan for plan in plans}
    return [plan for step_s, plan in sorted(by_time.items()) if step_s <= near * best_s]


def run_every_cut(name: str, rounds: int, steps: int, models: Models) -> dict[str, object]:
    """Run all cuts near the best and auto's plan; say how far that is from the best of them."""
    session = models.session(name)
    with emulated(_site((2, 1), 1000.0).cluster) as net:
        cluster = net.survey().cluster
        cuts = near_best(list(every_cut(session, cluster)))
        auto = planned(session, cluster, "auto")
        taken = measured(net, session, (auto, *cuts), rounds, steps)
    times = [statistics.median(each) for each in taken]
    return {
        "model": name,
        "cuts": len(cuts),
        "auto_s": times[0],
        "best_s": min(times[1:]),
        "behind": times[0] / min(times[1:]) - 1,
        "cut_s": [[plan.placement.reason, t] for plan, t in zip(cuts, times[1:], strict=True)],
    }


# --------------------------------------------------------------------------- the command


@click.command()
@click.option("--out", type=PATH, required=True, help="The file of rows; is added to.")
@click.option("--only", multiple=True, type=click.Choice(list(ROWS)))
@click.option("--pairs", default=3, show_default=True, help="Runs of each plan.")
@click.option("--steps", default=4, show_default=True, help="Of each run, besides its first.")
@click.option("--against", type=click.Choice(["naive", "whole"]), default="naive")
@click.option("--every-cut", type=click.Choice(list(ROWS)), help="Instead: all cuts of a model.")
@click.option("--share", type=float, help="Cores of the fastest device.  [default: half of all]")
@click.option("--json", "as_json", is_flag=True)
def main(
    out: Path,
    only: tuple[str, ...],
    pairs: int,
    steps: int,
    against: str,
    every_cut: str | None,
    share: float | None,
    as_json: bool,
) -> None:
    """Measure what lacks, and show every case."""
    torch.set_num_threads(1)
    load("partitioner")
    load("estimator")
    work = out.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    os.environ["BIGBRAIN_PROFILES"] = str((work / "profiles.sqlite").resolve())
    with ExitStack() as stack:
        models = Models(work.resolve(), stack, {})
        if every_cut:
            found = run_every_cut(every_cut, pairs, steps, models)
            out.write_text(json.dumps(found) + "\n")
            click.echo(json.dumps(found))
            return
        rows = list(_read(out))
        for case in _lacking(only or tuple(ROWS), rows, models, pairs, steps, against, share):
            with out.open("a") as file:
                file.write(json.dumps(asdict(case)) + "\n")
            rows.append(case)
            click.echo(f"{time.strftime('%H:%M:%S')} {case}", err=True)
    for row in rows:
        click.echo(json.dumps(asdict(row)) if as_json else str(row))
    if not as_json and rows:
        reached = [row.faster / row.limit for row in rows]
        click.echo(
            f"of the limit: median {statistics.median(reached):.0%}, least {min(reached):.0%}"
        )


def _site(speeds: tuple[int, ...], mbit_per_s: float) -> Site:
    return Site(f"{'-'.join(map(str, speeds))}-{mbit_per_s:g}", speeds, mbit_per_s)


def _read(out: Path) -> Iterator[Case]:
    for line in out.read_text().splitlines() if out.exists() else ():
        row = json.loads(line)
        lists = {key: tuple(row[key]) for key in ("speeds", "naive_s", "auto_s")}
        yield Case(**{**row, **lists})


def _lacking(
    names: Sequence[str],
    rows: Sequence[Case],
    models: Models,
    pairs: int,
    steps: int,
    against: str,
    share: float | None,
) -> Iterator[Case]:
    done = {row.key for row in rows}
    wanted = [k for k in product(SPEEDS, MBIT_PER_S, names) if (k[2], k[0], k[1]) not in done]
    for name in names if wanted else ():
        models.session(name)  # profiled on the bare machine
    for (speeds, rate), group in groupby(wanted, key=lambda key: key[:2]):
        site = _site(speeds, rate)
        with emulated(site.cluster, share=share) as net:
            cluster = net.survey().cluster
            for _, _, name in group:
                yield compared(net, cluster, models, name, site, pairs, steps, against)


if __name__ == "__main__":
    main()
