"""Step time beside torch.distributed.pipelining: the same model, cut, schedule and machine, in turn.

    python tools/bench_peer.py [--json] [--pairs 7] [--steps 3] [--only 1f1b]

An 8-block GPT (512 wide, 128 tokens, 2048 words), 8 micro-batches of one row, two gloo processes with
one thread each; forward, backward and AdamW. Both sides stay alive and take turns, so that only one
computes; each turn is one step to warm up and then the timed ones. A step's time is that of its slower
rank, a turn's the median of its steps; the figure is the median over pairs of ours/theirs.

Others who use the processors meanwhile disturb a turn: their share is measured, a pair with more than
5 % of it is taken again (at most three times as many pairs in all), and the quietest pairs count.

"as it comes": our bundle as `split` writes it (it raises malloc's thresholds itself), theirs with
torch's defaults. "raised": theirs with the same thresholds, through glibc's environment variables.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from bigbrain_fx.capture import capture_file
from bigbrain_fx.compile import source_of
from bigbrain_fx.core import Cluster, Device, Graph, Link, Placement
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.launch import free_port
from bigbrain_fx.plan import Options, make_plan, with_placement

TOOLS = Path(__file__).resolve().parent
MODEL = TOOLS / "peer_model.py"
SIDE = TOOLS / "peer_side.py"
MICRO_BATCHES = 8
CUT = 4  # blocks on the first of two devices
TOLERANCE = 1e-6  # of a gradient's largest entry
START_S = 120.0
STEP_S = 60.0  # longest that one step may take
GRACE_S = 5.0
KEEP_BYTES = 1 << 30
RAISED = {"MALLOC_TRIM_THRESHOLD_": str(KEEP_BYTES), "MALLOC_MMAP_THRESHOLD_": str(KEEP_BYTES)}
QUIET = 0.05  # share of the processors that others may use while we measure
QUIET_WAIT_S = 15.0
ATTEMPTS = 3  # times `--pairs`


@dataclass(frozen=True)
class Series:
    """One comparison: `theirs` is "theirs" or "eager", `raised` whether it gets malloc's thresholds."""

    schedule: str
    theirs: str
    raised: bool

    @property
    def malloc(self) -> str:
        """The setting's name."""
        return "raised" if self.raised else "as it comes"


@dataclass(frozen=True)
class Pair:
    """One turn of each side: seconds a step; `others` is the share of the processors not used by us."""

    schedule: str
    against: str
    malloc: str
    pair: int
    ours_s: float
    theirs_s: float
    ratio: float
    others: float


@dataclass(frozen=True)
class Result:
    """A series in figures; memory is the largest resident size of the side's processes, in bytes."""

    schedule: str
    against: str
    malloc: str
    quiet_pairs: int
    ours_s: float
    theirs_s: float
    ratio: float
    lowest: float
    highest: float
    gradient_error: float
    ours_rss_bytes: tuple[int, ...]
    theirs_rss_bytes: tuple[int, ...]


# --------------------------------------------------------------------------- bundles


def write_bundles(folder: Path, schedules: Sequence[str]) -> dict[str, Path]:
    """Split the model as `bigbrain-fx split` does, but cut after CUT blocks; and once for one device."""
    found: dict[str, Path] = {}
    with capture_file(MODEL) as session:
        source = source_of(session.facts)
        for name in schedules:
            devices = 1 if name == "one device" else 2
            schedule = "gpipe" if devices == 1 else name
            options = Options(schedule=schedule, micro_batches=MICRO_BATCHES)
            plan = make_plan(session.graph, _cluster(devices), source, options)
            plan = with_placement(plan, _placement(plan.graph, devices))
            found[name] = write_bundle(plan, session, folder / name.replace(" ", "_"))
    return found


def _cluster(count: int) -> Cluster:
    devices = (Device(f"d{i}", "here", "cpu", 8 << 30, 60e9, 12e9) for i in range(count))
    return Cluster(tuple(devices), Link(50e-6, 2e9))


def _placement(graph: Graph, devices: int) -> Placement:
    """Put everything from block CUT on, which ends with the loss, on the last device."""
    last = f"d{devices - 1}"
    start = next(i for i, op in enumerate(graph.ops) if op.module_path.startswith(f"blocks.{CUT}"))
    return Placement({op.name: last if i >= start else "d0" for i, op in enumerate(graph.ops)})


# --------------------------------------------------------------------------- processes


@dataclass
class Job:
    """The processes of one side; they train only between `train` and its answer."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ask(self, command: dict[str, Any], deadline_s: float) -> list[dict[str, Any]]:
        """Give all processes a command; return their answers, by rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
        return self.answers(deadline_s)

    def answers(self, deadline_s: float) -> list[dict[str, Any]]:
        """Read one line from every process."""
        until = time.monotonic() + deadline_s
        return [json.loads(_read_line(process, until)) for process in self.processes]

    def train(self, warm_up: int, steps: int) -> tuple[float, tuple[int, ...]]:
        """Train; return the median step time of the slower rank, and each rank's peak memory."""
        count = warm_up + steps
        answers = self.ask({"do": "steps", "count": count}, STEP_S * count)
        slower = map(max, zip(*(answer["step_s"] for answer in answers), strict=True))
        peaks = tuple(answer["max_rss_bytes"] for answer in answers)
        return statistics.median(list(slower)[warm_up:]), peaks

    def gradients(self, folder: Path) -> dict[str, Any]:
        """Return the gradients of the first step, of all ranks."""
        found: dict[str, Any] = {}
        for rank, process in enumerate(self.processes):
            path = folder / f"{process.pid}.safetensors"
            Job([process]).ask({"do": "gradients", "path": str(path)}, START_S)
            found |= load_file(path)
            assert found, f"rank {rank} has no gradients"
        return found


def _read_line(process: subprocess.Popen[bytes], until: float) -> bytes:
    """Read a line that is written in one go."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
    if not ready:
        raise TimeoutError(f"process {process.pid} did not answer in time")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with {process.wait(GRACE_S)}; see above")
    return line


@contextmanager
def job(side: str, bundle: Path, schedule: str, world: int, *, raised: bool) -> Iterator[Job]:
    """Start one side's processes and wait until they are ready; they end with the block, whatever happens."""
    found = Job()
    port = free_port()
    plain = {name: value for name, value in os.environ.items() if name not in RAISED}
    environment = {**plain, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= RAISED if raised else {}
    try:
        for rank in range(world):
            wanted = {
                "side": side,
                "bundle": str(bundle),
                "rank": rank,
                "world": world,
                "port": port,
                "schedule": schedule,
                "deadline_s": START_S,
            }
            command = [sys.executable, str(SIDE), json.dumps(wanted)]
            pipe = subprocess.PIPE
            found.processes.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=bundle)
            )
        found.answers(START_S)
        yield found
    finally:
        _stop(found.processes)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Meter:
    """Say how much of the processors others use while it is on (Linux; elsewhere 0)."""

    pids: list[int]

    def __enter__(self) -> Meter:
        self.before = _ticks(), self._own()
        return self

    def __exit__(self, *_: object) -> None:
        total, idle = (
            after - before for after, before in zip(_ticks(), self.before[0], strict=True)
        )
        own = self._own() - self.before[1]
        self.others = max(0.0, (total - idle - own) / total) if total else 0.0

    def _own(self) -> int:
        fields = (_proc(f"{pid}/stat").rpartition(")")[2].split() for pid in self.pids)
        return sum(int(entry[11]) + int(entry[12]) for entry in fields if entry)


def _ticks() -> tuple[int, int]:
    """Return clock ticks of all processors since boot: all, and idle."""
    numbers = [int(word) for word in _proc("stat").partition("\n")[0].split()[1:9]]
    return sum(numbers), sum(numbers[3:5])


def _proc(name: str) -> str:
    try:
        return Path("/proc", name).read_text()
    except OSError:  # not Linux
        return ""


def wait_for_quiet(pids: list[int]) -> None:
    """Wait, for a while, until others let the processors be."""
    until = time.monotonic() + QUIET_WAIT_S
    while time.monotonic() < until:
        with Meter(pids) as meter:
            time.sleep(0.3)
        if meter.others <= QUIET:
            return


# --------------------------------------------------------------------------- measuring


def measure(
    series: Series, bundle: Path, folder: Path, pairs: int, steps: int, show: Any
) -> Result:
    """Run one series: both sides alive, the first to go swapped with every pair."""
    world = 1 if series.theirs == "eager" else 2
    with ExitStack() as stack:
        ours = stack.enter_context(job("ours", bundle, series.schedule, world, raised=False))
        theirs = stack.enter_context(
            job(series.theirs, bundle, series.schedule, world, raised=series.raised)
        )
        sides = {"ours": ours, "theirs": theirs}
        for side in sides.values():
            side.train(0, 2)
        error = largest_error(ours.gradients(folder), theirs.gradients(folder))
        names = series.schedule, series.theirs, series.malloc
        taken: list[Pair] = []
        peaks: dict[str, tuple[int, ...]] = {}
        pids = [process.pid for side in sides.values() for process in side.processes]
        while _quiet(taken) < pairs and len(taken) < ATTEMPTS * pairs:
            number, others, times = len(taken), 0.0, {}
            wait_for_quiet(pids)
            for name in list(sides)[:: -1 if number % 2 else 1]:
                with Meter(pids) as meter:
                    times[name], peaks[name] = sides[name].train(1, steps)
                others = max(others, meter.others)
            ratio = times["ours"] / times["theirs"]
            taken.append(Pair(*names, number, times["ours"], times["theirs"], ratio, others))
            show(taken[-1])
    found = sorted(taken, key=lambda pair: pair.others)[:pairs]
    ratios = [pair.ratio for pair in found]
    return Result(
        *names,
        _quiet(found),
        statistics.median(pair.ours_s for pair in found),
        statistics.median(pair.theirs_s for pair in found),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        error,
        peaks["ours"],
        peaks["theirs"],
    )


def _quiet(pairs: Sequence[Pair]) -> int:
    return sum(pair.others <= QUIET for pair in pairs)


def largest_error(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of any gradient, as a share of that gradient's largest entry."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"the sides have other gradients: {sorted(ours.keys() ^ theirs.keys())}")
    return max(
        float((ours[name] - g).abs().max() / g.abs().max().clamp(min=1e-30))
        for name, g in theirs.items()
    )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object per pair, then a summary.")
@click.option("--pairs", default=7, show_default=True, help="Turns of each side per series.")
@click.option("--steps", default=3, show_default=True, help="Timed steps per turn.")
@click.option("--only", help="One of 1f1b, gpipe, 'one device'.")
@click.option("--malloc", type=click.Choice(["as it comes", "raised"]), help="One setting only.")
def main(as_json: bool, pairs: int, steps: int, only: str | None, malloc: str | None) -> None:
    """Measure our step time against torch.distributed.pipelining's, and a bundle on one device against eager."""
    wanted = [Series(s, "theirs", raised) for raised in (False, True) for s in ("1f1b", "gpipe")]
    wanted.append(Series("one device", "eager", True))
    wanted = [s for s in wanted if only in (None, s.schedule) and malloc in (None, s.malloc)]
    console = Console(highlight=False, stderr=as_json, width=140, soft_wrap=True)

    def show(pair: Pair) -> None:
        if as_json:
            print(json.dumps(asdict(pair)), flush=True)
        else:
            console.print(
                f"{pair.schedule:10} {pair.malloc:11} pair {pair.pair}: ours {pair.ours_s:.3f} s, {pair.against} "
                f"{pair.theirs_s:.3f} s, ratio {pair.ratio:.3f}; others use {pair.others:.0%}"
            )

    with tempfile.TemporaryDirectory(prefix="bench-peer-") as folder:
        bundles = write_bundles(Path(folder), list(dict.fromkeys(s.schedule for s in wanted)))
        results = [
            measure(s, bundles[s.schedule], Path(folder), pairs, steps, show) for s in wanted
        ]
    if as_json:
        print(json.dumps({"summary": [asdict(result) for result in results]}))
    console.print(_table(results))
    wrong = [r for r in results if r.gradient_error > TOLERANCE]
    if wrong:
        sys.exit(f"gradients differ: {[(r.schedule, r.gradient_error) for r in wrong]}")


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="median over pairs; memory: peak resident MiB by rank")
    columns = "schedule, malloc, against, quiet pairs, ours s, theirs s, ratio, range, gradients differ by, ours MiB, theirs MiB"
    for column in columns.split(", "):
        table.add_column(column)
    for r in results:
        table.add_row(
            r.schedule,
            r.malloc,
            r.against,
            str(r.quiet_pairs),
            f"{r.ours_s:.3f}",
            f"{r.theirs_s:.3f}",
            f"{r.ratio:.3f}",
            f"{r.lowest:.3f}-{r.highest:.3f}",
            f"{r.gradient_error:.0e}",
            "+".join(f"{b / 2**20:.0f}" for b in r.ours_rss_bytes),
            "+".join(f"{b / 2**20:.0f}" for b in r.theirs_rss_bytes),
        )
    return table


if __name__ == "__main__":
    main()
