"""Rows 12, 15, 16, 21 and 22: runs that end as a whole, by accident or as asked, and go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import LateError, Live, Run, is_running, run_job
from tools.conformance.faults.rows_processes import COLD_S, HANG_S
from tools.conformance.faults.verdicts import (
    DEADLINE_S,
    STEPS,
    Ground,
    Verdict,
    judged,
    per_step,
    stopped,
    together,
)


def zombie(ground: Ground) -> Verdict:
    """Row 12: a stopped process goes on after it was replaced; so does a whole stopped run."""
    return together((_one_zombie(ground), _zombie_run(ground)), "fenced; only the new run commits")


def _one_zombie(ground: Ground) -> Verdict:
    def wake(live: Live) -> None:
        live.wait_struck(0)
        old = live.pid("d1")
        live.wait_event("assigned")
        with suppress(ProcessLookupError):
            os.kill(old, signal.SIGCONT)
        live.facts["gone"] = not is_running(old)

    faults = [Fault("d1", 3, "forward", 1, "stop", spares=1)]
    run = ground.run(faults, hang_s=HANG_S, during=wake)
    more = [] if run.facts["gone"] else ["the stopped process still runs"]
    return judged(run, ground.reference(), faults, "", None, more=more)


def _zombie_run(ground: Ground) -> Verdict:
    """Stop a whole run, let another go on from its commits, and wake the first."""
    commits = ground.folder / f"zombie-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "2")
    seen: list[Run] = []

    def replace_it(live: Live) -> None:
        live.wait_struck(0)
        pids = [live.process.pid, *live.pids()]
        _signal(pids, signal.SIGSTOP)
        try:
            seen.append(ground.run((), *words, "--resume", spares=0))
        finally:
            _signal(pids, signal.SIGCONT)

    # the sleep keeps it in its step until it is stopped
    faults = [Fault("d1", 5, "forward", 1, "sleep", seconds=10.0)]
    first = ground.run(faults, *words, spares=0, during=replace_it, deadline_s=2 * DEADLINE_S)
    made = {record.generation for record in CheckpointStore(commits).records()}
    more = {
        f"the woken run ended with exit code {first.code}": first.code not in (0, None),
        "the woken run does not say that it was replaced": "was replaced by" in first.said,
        f"commits are of generations {made}": len(made) == 1,
    }
    problems = [text for text, holds in more.items() if not holds]
    return judged(seen[0], remaining(ground, seen[0]), (), "", None, more=problems)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def remaining(ground: Ground, run: Run, steps: int = STEPS) -> Run:
    """Return the reference for a run that was resumed: its processes have fewer steps behind."""
    first = min((line["step"] for lines in run.lines.values() for line in lines), default=0)
    whole = ground.reference(steps)
    lines = {
        key: [
            {**line, "forwards": line["forwards"] - first * per_step(old)[0]}
            for line in old[first:]
        ]
        for key, old in whole.lines.items()
    }
    return replace(whole, lines=lines)


def host_lost(ground: Ground) -> Verdict:
    """Row 16: all processes of one of two hosts; no supervisor spans hosts, so the others stop."""
    commits = ground.folder / f"host-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "2", "--deadline", "30")
    faults = [Fault("d2", 5, "forward", 1, others=("d3",))]
    program = (sys.executable, str(Path(__file__).with_name("plain.py")), str(len(ground.names)))
    common = ("--steps", str(STEPS), "--json", *words)
    lost = run_job(ground.fresh(faults), (*program, *common), DEADLINE_S)
    took_s = lost.ended_s - lost.struck[0] if lost.struck else None
    checks = {
        f"exit code {lost.code}": lost.code == 75,
        "the others do not say whom they missed": "the peer is gone" in lost.said,
    }
    stop = stopped(lost, "", checks, took_s, 30.0 + COLD_S)
    continued = run_job(ground.fresh(), (*program, *common, "--resume"), DEADLINE_S)
    again = judged(continued, remaining(ground, continued), (), "")
    return together((stop, again), "the others stop and say so; resumed, nothing differs")


def mpi_rank(ground: Ground) -> Verdict:
    """Row 23: mpirun ends all ranks when one dies; the same command with --resume goes on."""
    commits = ground.folder / f"mpi-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "2", "--deadline", "30")
    faults = [Fault("d1", 5, "forward", 1)]
    stand_in = Path(__file__).with_name("plain.py")
    program = (sys.executable, str(stand_in), str(len(ground.names)), "--mpi")
    common = ("--steps", str(STEPS), "--json", *words)
    lost = run_job(ground.fresh(faults), (*program, *common), DEADLINE_S)
    took_s = lost.ended_s - lost.struck[0] if lost.struck else None
    stop = stopped(lost, "", {f"exit code {lost.code}": lost.code != 0}, took_s, COLD_S)
    continued = run_job(ground.fresh(), (*program, *common, "--resume"), DEADLINE_S)
    again = judged(continued, remaining(ground, continued), (), "")
    outcome = "all ranks end (stand-in for mpirun: none here); resumed, nothing differs"
    return together((stop, again), outcome)


def resumed(ground: Ground, *words: str, steps: int = STEPS) -> Verdict:
    """Go on from the commits of a run that was stopped; judge where that ends."""
    run = ground.run((), *words, "--resume", spares=0, steps=steps)
    return judged(run, remaining(ground, run, steps), (), "")


def _gone(pids: Sequence[int], patience_s: float) -> float:
    """Wait until processes are gone; return when."""
    until = time.monotonic() + patience_s
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            raise LateError(f"processes are left of {pids}")
        time.sleep(0.005)
    return time.time()


def supervisor_killed(ground: Ground) -> Verdict:
    """Row 15."""
    commits = ground.folder / f"supervisor-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "2")

    def watch(live: Live) -> None:
        at = live.wait_struck(0)
        live.facts["gone_s"] = _gone(live.pids(), 20.0) - at

    run = ground.run([Fault("d1", 5, "forward", 1, "kill_parent")], *words, during=watch)
    checks = {f"exit code {run.code}": run.code == -signal.SIGKILL}
    stop = stopped(run, "", checks, run.facts["gone_s"], 20.0)
    return together((stop, resumed(ground, *words)), "all processes end; resumed, nothing differs")


def asked_to_stop(ground: Ground) -> Verdict:
    """Row 21: SIGTERM."""
    commits = ground.folder / f"sigterm-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "100")

    def ask(live: Live) -> None:
        live.facts["at"] = live.wait_struck(0)
        live.process.send_signal(signal.SIGTERM)

    faults = [Fault("d1", 5, "forward", 1, "sleep", seconds=0.5)]
    run = ground.run(faults, *words, during=ask)
    newest = [record.step for record in CheckpointStore(commits).records()]
    checks = {
        f"exit code {run.code}: {run.said[-300:]}": run.code == 0,
        f"commits of steps {newest}": bool(newest) and 5 < newest[0] < STEPS,
    }
    stop = stopped(run, "", checks, run.ended_s - run.facts["at"], 30.0)
    return together((stop, resumed(ground, *words)), "step ended, committed, exit 0; resumed alike")


def interrupted(ground: Ground) -> Verdict:
    """Row 22: Ctrl-C goes to all processes of the terminal's group."""

    def press(live: Live) -> None:
        live.facts["at"] = live.wait_struck(0)
        os.killpg(live.process.pid, signal.SIGINT)

    faults = [Fault("d1", 5, "forward", 1, "sleep", seconds=1.0)]
    run = ground.run(faults, spares=0, during=press)
    said = (run.folder / "said.txt").read_text().splitlines()
    own = [line for line in said if not line.startswith(("{", "[generation"))]
    checks = {
        f"exit code {run.code}": run.code == 130,
        f"it said {own}": len(own) == 1,
    }
    return stopped(run, "one line, no process left", checks, run.ended_s - run.facts["at"], 5.0)
