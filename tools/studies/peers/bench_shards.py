"""Replicas, ZeRO and tensor groups beside torch's own: same model, batch and machine, in turns.

    python -m tools.studies.peers.bench_shards [--pairs 16] [--steps 2] [--only DDP] [--tensors]

The 8-block GPT of `bench_peer.py`, two gloo processes of one thread, four rows of 128 tokens
on each; forward, backward, sum of gradients, AdamW. Both sides stay alive and take turns; pairs in
which others used more than 5 % of the processors are taken again, and the quietest count.

    ours                      theirs
    --replicas 2              DistributedDataParallel
    --zero 1                  the same with ZeroRedundancyOptimizer
    --zero 2 --sum-order tree FSDP2's fully_shard, reshard_after_forward=False
    --tensor 2                DTensor's ColwiseParallel and RowwiseParallel, loss_parallel; all rows
    --replicas 2 with replay  DistributedDataParallel: launch.py watches, messages are kept

A ratio is the median over pairs of ours / theirs: of both ranks' processor time, which others
disturb little, and of the slower rank's clock. Both sides' gradients of the first step must agree.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from torch import Tensor

import bigbrain_fx
from bigbrain_fx.bundles import export_weights
from bigbrain_fx.core import Cluster, Device, Link, SumOrder, ZeroStage
from bigbrain_fx.plan import Options, read_plan
from bigbrain_fx.runtime import joined
from bigbrain_fx.weights import part_name
from tools.conformance.live_bytes import tracked_bytes
from tools.studies.peers.bench_peer import (
    ATTEMPTS,
    MODEL,
    QUIET,
    QUIET_WAIT_S,
    TOLERANCE,
    largest_error,
)
from tools.studies.peers.peer_jobs import STEP_S, Job, Meter, job, wait_for_quiet
from tools.studies.peers.peer_supervised import Supervised, supervised

WORLD = 2
STEADY = 0.01  # a peak that grows by more from 3 steps to 6 is not one
WHOLE = "whole.safetensors"  # where `peer_side` finds the weights that a group's bundle began with
SUMMED_OTHERWISE = 1e-5  # of a gradient's largest entry: members' parts are added in another order


@dataclass(frozen=True)
class Series:
    """One comparison: a class of torch's, and the options of ours that divide as much."""

    against: str
    zero: ZeroStage = 0
    order: SumOrder = "replica"
    members: int = 1
    replayed: bool = False  # ours under its supervisor: what is sent is kept, hearts beat

    @property
    def label(self) -> str:
        """Return what the row is called."""
        return f"{self.against}+replay" if self.replayed else self.against

    @property
    def tolerance(self) -> float:
        """How far the gradients of both sides may be apart."""
        return TOLERANCE if self.members == 1 else SUMMED_OTHERWISE


ALL = (
    Series("DDP", 0, "replica"),
    Series("ZeroRedundancyOptimizer", 1, "replica"),
    Series("FSDP2", 2, "tree"),
    Series("DTensor", members=WORLD),
    Series("DDP", replayed=True),
)


@dataclass(frozen=True)
class Turn:
    """One side's turn, a step: processor seconds of all ranks, the slower one's clock, memory."""

    cpu_s: float
    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Pair:
    """One turn of each side; `others` is what others used of the processors meanwhile."""

    against: str
    ours: Turn
    theirs: Turn
    others: float


@dataclass(frozen=True)
class Result:
    """A series in figures: medians over pairs, and the range of the processor time's ratio."""

    against: str
    pairs: int
    quiet_pairs: int
    ours_cpu_s: float
    theirs_cpu_s: float
    cpu_ratio: float
    lowest: float
    highest: float
    step_ratio: float
    peak_ratio: float
    gradient_error: float


def write_bundle(folder: Path, series: Series) -> Path:
    """Split the model into two replicas of one device each, or one of two that share each op."""
    devices = (Device(f"d{i}", "here", "cpu", 8 << 30, 60e9, 12e9) for i in range(WORLD))
    replicas = WORLD // series.members
    options = Options(
        "naive",
        micro_batches=replicas,
        replicas=replicas,
        zero_stage=series.zero,
        sum_order=series.order,
        tensor=series.members,
    )
    cluster = Cluster(tuple(devices), Link(50e-6, 2e9))
    bundle = bigbrain_fx.split(MODEL, cluster, folder / series.label, options).bundle
    if series.members > 1:
        export_weights(bundle, bundle / WHOLE)
    return bundle


def whole_gradients(bundle: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by the names of the model: those of a group's members put together."""
    shards = read_plan(bundle).sharded.shards
    parts = {part_name(shard.param, shard.member): shard for shard in shards}
    made = {name: gradient for name, gradient in found.items() if name not in parts}
    for name in dict.fromkeys(shard.param for shard in shards):
        own = [shard for shard in shards if shard.param == name]
        tensors = [found[part_name(name, shard.member)] for shard in own]
        lengths = [shard.stop - shard.start for shard in own]
        made[name] = joined(tensors, own[0].dim, own[0].inner, lengths)
    return made


def measure(
    series: Series, bundle: Path, pairs: int, steps: int, show: Callable[[Pair], None]
) -> Result:
    """Run one series: both sides alive, the first to go swapped with every pair."""
    with ExitStack() as stack:
        ours = stack.enter_context(_ours(series, bundle))
        theirs = stack.enter_context(_job(series.against, bundle))
        sides = {"ours": ours, "theirs": theirs}
        for side in sides.values():
            side.train(3)  # to warm up: the optimizer's state, and what torch sets up at first
        own = whole_gradients(bundle, ours.gradients(bundle))
        error = largest_error(own, theirs.gradients(bundle))
        taken: list[Pair] = []
        while _quiet(taken) < pairs and len(taken) < ATTEMPTS * pairs:
            taken.append(_pair(series, sides, len(taken), steps))
            show(taken[-1])
    return _result(series, sorted(taken, key=lambda pair: pair.others)[:pairs], error)


def _ours(series: Series, bundle: Path) -> AbstractContextManager[Job | Supervised]:
    return supervised(bundle) if series.replayed else _job("ours", bundle)


def _job(side: str, bundle: Path, *, tensors: bool = False) -> AbstractContextManager[Job]:
    return job(side, bundle, "", WORLD, raised=True, tensors=tensors)


def their_tensor_bytes(series: Series, bundle: Path) -> int | None:
    """Return what tensors take at their most on the fuller rank; None where it cannot be told.

    It can where it does not grow with the steps: see `tensor_peak.py`.
    """
    found = []
    for steps in (3, 6):
        with _job(series.against, bundle, tensors=True) as processes:
            processes.train(steps)
            answers = processes.ask({"do": "tensors"}, STEP_S)
        found.append(max(answer["peak_bytes"] for answer in answers))
    return found[0] if found[1] <= (1 + STEADY) * found[0] else None


def _pair(series: Series, sides: Mapping[str, Job | Supervised], number: int, steps: int) -> Pair:
    pids = [pid for side in sides.values() for pid in side.pids]
    found, others = dict[str, Turn](), 0.0
    wait_for_quiet(pids, QUIET, QUIET_WAIT_S)
    for name in list(sides)[:: -1 if number % 2 else 1]:
        with Meter(pids) as meter:
            found[name] = _turn(sides[name], steps)
        others = max(others, meter.others)
    return Pair(series.label, found["ours"], found["theirs"], others)


def _turn(side: Job | Supervised, steps: int) -> Turn:
    answers = side.ask({"do": "steps", "count": steps}, STEP_S * steps)
    slower = map(max, zip(*(answer["step_s"] for answer in answers), strict=True))
    return Turn(
        sum(answer["cpu_s"] for answer in answers) / steps,
        statistics.median(slower),
        max(answer["max_rss_bytes"] for answer in answers),
    )


def _result(series: Series, pairs: Sequence[Pair], error: float) -> Result:
    ratios = [pair.ours.cpu_s / pair.theirs.cpu_s for pair in pairs]
    return Result(
        series.label,
        len(pairs),
        _quiet(pairs),
        statistics.median(pair.ours.cpu_s for pair in pairs),
        statistics.median(pair.theirs.cpu_s for pair in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(pair.ours.step_s / pair.theirs.step_s for pair in pairs),
        pairs[-1].ours.peak_bytes / pairs[-1].theirs.peak_bytes,
        error,
    )


def _quiet(pairs: Sequence[Pair]) -> int:
    return sum(pair.others <= QUIET for pair in pairs)


# --------------------------------------------------------------------------- the command


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object per pair, then a summary.")
@click.option("--pairs", default=16, show_default=True, help="Turns of each side per series.")
@click.option("--steps", default=2, show_default=True, help="Steps per turn.")
@click.option("--only", type=click.Choice([s.label for s in ALL]), help="One of theirs.")
@click.option("--tensors", is_flag=True, help="Their bytes at their most, instead of time.")
def main(as_json: bool, pairs: int, steps: int, only: str | None, tensors: bool) -> None:
    """Measure replicas, ZeRO and groups beside DDP, ZeroRedundancyOptimizer, FSDP2 and DTensor."""
    wanted = [series for series in ALL if only in (None, series.label)]
    if tensors:
        return _print_tensors([series for series in wanted if not series.replayed])
    _compare(wanted, as_json, pairs, steps)


def _print_tensors(wanted: Sequence[Series]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-shards-") as folder:
        for series in wanted:
            bundle = write_bundle(Path(folder), series)
            ours = max(tracked_bytes(bundle, bundle.with_suffix(".tracked")).values())
            theirs = their_tensor_bytes(series, bundle)
            said = "cannot be told" if theirs is None else f"{theirs / 2**20:.1f} MiB"
            ratio = "" if theirs is None else f", ratio {ours / theirs:.3f}"
            print(f"{series.label}: ours {ours / 2**20:.1f} MiB, theirs {said}{ratio}", flush=True)


def _compare(wanted: Sequence[Series], as_json: bool, pairs: int, steps: int) -> None:

    def show(pair: Pair) -> None:
        line = (
            f"{pair.against}: processor time ours {pair.ours.cpu_s:.3f} s, theirs "
            f"{pair.theirs.cpu_s:.3f} s, ratio {pair.ours.cpu_s / pair.theirs.cpu_s:.3f}; "
            f"others use {pair.others:.0%}"
        )
        print(json.dumps(asdict(pair)) if as_json else line, flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-shards-") as folder:
        results = [
            measure(series, write_bundle(Path(folder), series), pairs, steps, show)
            for series in wanted
        ]
    if as_json:
        print(json.dumps({"summary": [asdict(result) for result in results]}))
    Console(highlight=False, stderr=as_json, width=150).print(_table(results))
    allowed = {series.label: series.tolerance for series in wanted}
    wrong = [
        (r.against, r.gradient_error) for r in results if r.gradient_error > allowed[r.against]
    ]
    if wrong:
        sys.exit(f"gradients differ: {wrong}")


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="medians over the quietest pairs")
    names = "against, quiet, ours cpu s, theirs cpu s, cpu ratio, range, step ratio, peak ratio"
    for column in (*names.split(", "), "gradients off by"):
        table.add_column(column)
    for r in results:
        table.add_row(
            r.against,
            f"{r.quiet_pairs} of {r.pairs}",
            *(f"{number:.3f}" for number in (r.ours_cpu_s, r.theirs_cpu_s, r.cpu_ratio)),
            f"{r.lowest:.3f}-{r.highest:.3f}",
            *(f"{number:.3f}" for number in (r.step_ratio, r.peak_ratio)),
            f"{r.gradient_error:.0e}",
        )
    return table


if __name__ == "__main__":
    main()
