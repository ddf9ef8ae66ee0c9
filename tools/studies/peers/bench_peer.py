"""Step time beside torch.distributed.pipelining: same model, cut, schedule and machine, in turn.

    python -m tools.studies.peers.bench_peer [--pairs 7] [--steps 2] [--only 1f1b] [--malloc raised]

An 8-block GPT (512 wide, 128 tokens, 2048 words), 8 micro-batches of one row, two gloo processes
with one thread each; forward, backward and AdamW. Both sides stay alive and take turns, so that
only one computes. A step's time is that of its slower rank, a turn's the median of its steps; the
figure is the median over pairs of ours/theirs.

Others who use the processors disturb a turn. Their share is measured; a pair with more than 5 % of
it is taken again (six times as many pairs in all at most), and the quietest pairs count.

"as it comes": our bundle as `split` writes it (it raises malloc's thresholds itself), theirs with
torch's defaults. "raised": theirs with the same thresholds, through glibc's environment variables.
"one device": a bundle for one device against an eager loop, both with raised thresholds.

zb-h1 and zb-v stand against their 1F1B, too: what a split backward gains over a whole one. Their
cuts are of whole blocks, alike; so is ours but for zb-v, which cuts the line where devices are
busy alike, by ops that are measured first.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from torch import Tensor

import bigbrain_fx
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.plan import Options
from tools.studies.peers import peer_model
from tools.studies.peers.peer_jobs import Job, Meter, job, wait_for_quiet

MODEL = Path(__file__).resolve().parent / "peer_model.py"
MICRO_BATCHES = 8
CUT = 4  # blocks on the first of two devices, on their side too
TOLERANCE = 1e-6  # of a gradient's largest entry
QUIET = 0.05  # share of the processors that others may use while we measure
QUIET_WAIT_S = 10.0
ATTEMPTS = 6  # times `--pairs`


@dataclass(frozen=True)
class Series:
    """One comparison; `against` is their schedule or "eager", `malloc` is that side's setting."""

    schedule: str
    against: str
    malloc: str


ALL = (
    Series("1f1b", "1f1b", "as it comes"),
    Series("gpipe", "gpipe", "as it comes"),
    Series("zb-h1", "1f1b", "as it comes"),
    Series("zb-v", "1f1b", "as it comes"),
    Series("zb-v", "zb-v", "as it comes"),
    Series("1f1b", "1f1b", "raised"),
    Series("gpipe", "gpipe", "raised"),
    Series("zb-h1", "1f1b", "raised"),
    Series("zb-v", "1f1b", "raised"),
    Series("zb-v", "zb-v", "raised"),
    Series("one device", "eager", "raised"),
)


ONLY = list(dict.fromkeys(series.schedule for series in ALL))


@dataclass(frozen=True)
class Pair(Series):
    """One turn of each side, in seconds a step; `others` is what others used of the processors."""

    pair: int
    ours_s: float
    theirs_s: float
    ratio: float
    others: float


@dataclass(frozen=True)
class Result(Series):
    """A series in figures: medians, the range of the ratio, and peak resident memory by rank."""

    pairs: int
    quiet_pairs: int
    ours_s: float
    theirs_s: float
    ratio: float
    quartiles: tuple[float, float]
    gradient_error: float
    ours_rss_bytes: tuple[int, ...]
    theirs_rss_bytes: tuple[int, ...]


def write_bundle(folder: Path, schedule: str) -> Path:
    """Split the model as `bigbrain-fx split` does; refuse a plan that is not cut as theirs is."""
    count = 1 if schedule == "one device" else 2
    devices = (Device(f"d{i}", "here", "cpu", 8 << 30, 60e9, 12e9) for i in range(count))
    options = Options(schedule=None if count == 1 else schedule, micro_batches=MICRO_BATCHES)
    if schedule == "zb-v":
        options = replace(options, estimator=_measured(folder))
    out = folder / schedule.replace(" ", "_")
    made = bigbrain_fx.split(MODEL, Cluster(tuple(devices), Link(50e-6, 2e9)), out, options)
    first = made.plan.stages.stages[0].params
    blocks = {name.split(".")[1] for name in first if name.startswith("blocks.")}
    if count == 2 and schedule != "zb-v" and len(blocks) != CUT:
        raise SystemExit(f"the plan puts {len(blocks)} blocks on the first device, theirs {CUT}")
    return made.bundle


def _measured(folder: Path) -> str:
    """Measure the model's ops, as `bigbrain-fx profile` does; name what reads them."""
    os.environ["BIGBRAIN_PROFILES"] = str(folder / "profiles.sqlite")
    rows = peer_model.BATCH // MICRO_BATCHES
    profile(MODEL, folder / "profiles.sqlite", ProfileOptions(rows=(rows,), device="cpu"))
    return "measured"


def measure(
    series: Series, bundle: Path, pairs: int, steps: int, show: Callable[[Pair], None]
) -> Result:
    """Run one series: both sides alive, the first to go swapped with every pair."""
    world = 1 if series.against == "eager" else 2
    with ExitStack() as stack:
        ours = stack.enter_context(job("ours", bundle, series.schedule, world, raised=False))
        raised = series.malloc == "raised"
        whose = "eager" if series.against == "eager" else "theirs"
        theirs = job(whose, bundle, series.against, world, raised=raised)
        sides = {"ours": ours, "theirs": stack.enter_context(theirs)}
        for side in sides.values():
            side.train(3)  # to warm up: the optimizer's state, and what torch sets up at first
        error = largest_error(*(side.gradients(bundle) for side in sides.values()))
        taken: list[Pair] = []
        while _quiet(taken) < pairs and len(taken) < ATTEMPTS * pairs:
            pair, peaks = _pair(series, sides, len(taken), steps)
            taken.append(pair)
            show(pair)
    return _result(series, sorted(taken, key=lambda pair: pair.others)[:pairs], error, peaks)


def _pair(
    series: Series, sides: Mapping[str, Job], number: int, steps: int
) -> tuple[Pair, dict[str, tuple[int, ...]]]:
    pids = [pid for side in sides.values() for pid in side.pids]
    times, peaks, others = dict[str, float](), dict[str, tuple[int, ...]](), 0.0
    wait_for_quiet(pids, QUIET, QUIET_WAIT_S)
    for name in list(sides)[:: -1 if number % 2 else 1]:
        with Meter(pids) as meter:
            times[name], peaks[name] = sides[name].train(steps)
        others = max(others, meter.others)
    ours_s, theirs_s = times["ours"], times["theirs"]
    return Pair(
        **asdict(series),
        pair=number,
        ours_s=ours_s,
        theirs_s=theirs_s,
        ratio=ours_s / theirs_s,
        others=others,
    ), peaks


def _result(
    series: Series, pairs: Sequence[Pair], error: float, peaks: Mapping[str, tuple[int, ...]]
) -> Result:
    ratios = [pair.ratio for pair in pairs]
    return Result(
        **asdict(series),
        pairs=len(pairs),
        quiet_pairs=_quiet(pairs),
        ours_s=statistics.median(pair.ours_s for pair in pairs),
        theirs_s=statistics.median(pair.theirs_s for pair in pairs),
        ratio=statistics.median(ratios),
        quartiles=_quartiles(ratios),
        gradient_error=error,
        ours_rss_bytes=peaks["ours"],
        theirs_rss_bytes=peaks["theirs"],
    )


def _quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    if len(ratios) < 2:
        return min(ratios), max(ratios)
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return lower, upper


def _quiet(pairs: Sequence[Pair]) -> int:
    return sum(pair.others <= QUIET for pair in pairs)


def largest_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference of any gradient, as a share of its largest entry."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"the sides have other gradients: {sorted(ours.keys() ^ theirs.keys())}")
    return max(
        float((ours[name] - want).abs().max() / want.abs().max().clamp(min=1e-30))
        for name, want in theirs.items()
    )


# --------------------------------------------------------------------------- the command


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object per pair, then a summary.")
@click.option("--pairs", default=7, show_default=True, help="Turns of each side per series.")
@click.option("--steps", default=2, show_default=True, help="Steps per turn.")
@click.option("--only", type=click.Choice(ONLY), help="One schedule.")
@click.option("--malloc", type=click.Choice(["as it comes", "raised"]), help="One setting.")
def main(as_json: bool, pairs: int, steps: int, only: str | None, malloc: str | None) -> None:
    """Measure our step time beside torch.distributed.pipelining's, and one device beside eager."""
    wanted = [s for s in ALL if only in (None, s.schedule) and malloc in (None, s.malloc)]
    console = Console(highlight=False, stderr=as_json, width=150)

    def show(pair: Pair) -> None:
        line = (
            f"{pair.schedule}, {pair.malloc}, pair {pair.pair}: ours {pair.ours_s:.3f} s, "
            f"their {pair.against} {pair.theirs_s:.3f} s, ratio {pair.ratio:.3f}; "
            f"others use {pair.others:.0%}"
        )
        print(json.dumps(asdict(pair)) if as_json else line, flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-peer-") as folder:
        names = dict.fromkeys(series.schedule for series in wanted)
        bundles = {name: write_bundle(Path(folder), name) for name in names}
        results = [measure(s, bundles[s.schedule], pairs, steps, show) for s in wanted]
    if as_json:
        print(json.dumps({"summary": [asdict(result) for result in results]}))
    console.print(_table(results))
    wrong = [result for result in results if result.gradient_error > TOLERANCE]
    if wrong:
        sys.exit(f"gradients differ: {[(r.schedule, r.gradient_error) for r in wrong]}")


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="medians over the quietest pairs; memory: peak resident MiB by rank")
    names = "schedule, malloc, against, quiet, ours s, theirs s, ratio, quartiles, gradients off by"
    for column in (*names.split(", "), "ours MiB", "theirs MiB"):
        table.add_column(column)
    for r in results:
        table.add_row(
            *(r.schedule, r.malloc, r.against),
            f"{r.quiet_pairs} of {r.pairs}",
            *(f"{number:.3f}" for number in (r.ours_s, r.theirs_s, r.ratio)),
            "-".join(f"{ratio:.3f}" for ratio in r.quartiles),
            f"{r.gradient_error:.0e}",
            *(
                "+".join(f"{n >> 20}" for n in sizes)
                for sizes in (r.ours_rss_bytes, r.theirs_rss_bytes)
            ),
        )
    return table


if __name__ == "__main__":
    main()
