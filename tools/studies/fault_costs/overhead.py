"""What log and snapshots cost when nothing happens: three runs that take their steps in turn.

One without a supervisor, one with it and no snapshots, one with it and snapshots as it chooses. All
three are there all the time; a gate lets one of them do a block of steps while the others wait, so
that a slow moment of the machine meets all alike.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tools.conformance.faults.bundle import Size
from tools.conformance.faults.figures import Figures
from tools.conformance.faults.jobs import Live, Run, launch_words, run_job
from tools.conformance.faults.verdicts import Ground, ground
from tools.studies.peers.peer_jobs import processor_s

PLAIN = Path(__file__).resolve().parents[2] / "faulting" / "plain.py"
BLOCK = 4  # steps
WARM_UP = 2  # blocks
STATE_MB = 100.0  # of a device
NEVER = "1000000"  # steps between snapshots
WITHOUT, WITH = 1.01, 1.03  # bounds: no snapshot in the window; as chosen
NOISE = 0.06  # between the quartiles: with more, a cost of 1 or 3 % cannot be told
LATE_S = 1200.0
HANG_S = 600.0  # who waits at the gate is not hung


def size_for(state_mb: float, devices: int = 4) -> Size:
    """Return a size whose state (parameters and Adam's two copies) is so large on every device."""
    width = 512
    per_block = 12 * width * width * 4 * 3 / 1e6
    return Size(width, max(devices, round(devices * state_mb / per_block)), 512, 16)


@dataclass
class _Runner:
    """One of the runs, stopped at its gate most of the time."""

    name: str
    folder: Path
    names: tuple[str, ...]
    done: Future[Run] = field(default_factory=Future)
    lives: list[Live] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)

    def hear(self, live: Live) -> None:
        self.lives.append(live)
        self.started.set()

    def wait_at(self, block: int) -> float:
        """Wait until all devices stand before a block; return when the last one came."""
        return max(self._times(name, block)[0] for name in self.names)

    def _times(self, name: str, block: int) -> list[float]:
        path = self.folder / "bundle" / "faults" / f"gate-{name}"
        until = time.monotonic() + LATE_S
        while len(rows := _rows(path)) <= block:
            if self.done.done():
                self.done.result()
                raise RuntimeError(f"the run {self.name} ended at its gate")
            if time.monotonic() > until:
                raise RuntimeError(f"the run {self.name} does not come to its gate")
            time.sleep(0.01)
        return rows[block]

    def block_s(self, block: int) -> float:
        """Let it do a block; return the seconds from the first device's start to the last's end."""
        (self.folder / "bundle" / "faults" / f"go-{block}").touch()
        end = self.wait_at(block + 1)
        return end - min(self._times(name, block)[1] for name in self.names)

    @property
    def processor_s(self) -> float:
        """The processor time that its processes, the launcher among them, have taken until now."""
        live = self.lives[0]
        return sum(map(processor_s, (live.process.pid, *live.pids())))

    def let_go(self, block: int) -> None:
        (self.folder / "bundle" / "faults" / f"go-{block}").touch()


def _rows(path: Path) -> list[list[float]]:
    if not path.exists():
        return []
    return [list(map(float, row.split())) for row in path.read_text().splitlines() if row.strip()]


def measure(rounds: int) -> Figures:
    """Time so many rounds of blocks; the order within a round is drawn."""
    with ground(size_for(STATE_MB)) as here:
        return _measured(here, rounds)


def _measured(here: Ground, rounds: int) -> Figures:
    steps = BLOCK * (WARM_UP + rounds + 1)
    plain = (sys.executable, str(PLAIN), str(len(here.names)))
    kept = launch_words(steps, spares=0, hang_s=HANG_S)
    words = {
        "off": (*plain, "--steps", str(steps), "--json"),
        "log": (*kept, "--snapshot-every", NEVER),
        "all": kept,
    }
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(words)))
        runners = [_started(here, pool, name, w, steps) for name, w in words.items()]
        try:
            times = _in_turn(runners, rounds)
        finally:
            for runner in runners:
                runner.let_go(WARM_UP + rounds)
        runs = {runner.name: runner.done.result() for runner in runners}
    return _figures(times, runs)


def _started(
    here: Ground, pool: ThreadPoolExecutor, name: str, words: Sequence[str], steps: int
) -> _Runner:
    runner = _Runner(name, here.fresh((), steps, BLOCK), here.names)
    runner.done = pool.submit(run_job, runner.folder, words, LATE_S, runner.hear)
    runner.wait_at(0)  # one after another: the machine is small
    return runner


@dataclass(frozen=True)
class _Block:
    """What a block of steps took: on the clock, and of all processors."""

    wall_s: float
    processor_s: float


def _in_turn(runners: Sequence[_Runner], rounds: int) -> list[dict[str, _Block]]:
    dice, found = random.Random(0), []
    for block in range(WARM_UP + rounds):
        order = dice.sample(list(runners), len(runners))
        found.append({runner.name: _block(runner, block) for runner in order})
    return found[WARM_UP:]


def _block(runner: _Runner, block: int) -> _Block:
    before_s = runner.processor_s
    wall_s = runner.block_s(block)
    return _Block(wall_s, runner.processor_s - before_s)


def _figures(times: Sequence[dict[str, _Block]], runs: dict[str, Run]) -> Figures:
    log = [row["log"].wall_s / row["off"].wall_s for row in times]
    every = [row["all"].wall_s / row["off"].wall_s for row in times]
    busy_s = {name: sum(row[name].processor_s for row in times) for name in runs}
    busy = {name: busy_s[name] / busy_s["off"] for name in ("log", "all")}
    same = runs["off"].hashes == runs["log"].hashes == runs["all"].hashes != {}
    snapshots = runs["all"].of("snapshot")
    facts = {
        "rounds": len(times),
        "block_steps": BLOCK,
        "step_s": round(statistics.median(row["off"].wall_s for row in times) / BLOCK, 4),
        "processor_ratios": {name: round(ratio, 4) for name, ratio in busy.items()},
        "log_ratio": _spread(log),
        "all_ratio": _spread(every),
        "snapshot_every": snapshots[-1]["every"] if snapshots else None,
        "same_bits": same,
    }
    text = (
        f"Steps of {facts['step_s']} s, {len(times)} rounds of {BLOCK} steps in turn. With log and "
        f"heartbeats, no snapshots: {_text(log)} of the time without (bound {WITHOUT}). With "
        f"snapshots, as chosen every {facts['snapshot_every']} steps: {_text(every)} "
        f"(bound {WITH}). Of processor time, all processes together: {busy['log']:.3f} and "
        f"{busy['all']:.3f}. Same bits: {'yes' if same else 'NO'}."
    )
    kept = (
        statistics.median(log) <= WITHOUT and statistics.median(every) <= WITH and bool(snapshots)
    )
    return Figures("What it costs when nothing happens", text, facts, kept and same)


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def _text(ratios: Sequence[float]) -> str:
    """Return the ratio with its spread, and whether that is small enough to tell a cost."""
    spread = _spread(ratios)
    low, high = spread["low"], spread["high"]
    noise = ", too noisy to tell" if high - low > NOISE else ""
    return f"{spread['median']:.3f} (quartiles {low:.3f} to {high:.3f}{noise})"
