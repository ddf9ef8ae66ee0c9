"""Rows 1-11, 13, 19 and 20: processes that die, hang or are slow, and numbers that come wrong."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence

from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import LateError, Live, Run
from tools.conformance.faults.verdicts import (
    BROKEN,
    STEPS,
    Ground,
    Verdict,
    judged,
    per_step,
    stopped,
    together,
)

HANG_S = 5.0  # T_hang of the rows about hangs
WARM_S, COLD_S = 1.0, 15.0


def replayed(ground: Ground, faults: Sequence[Fault], outcome: str, bound_s: float) -> Verdict:
    """Run with faults that must change nothing."""
    spares = max((fault.spares for fault in faults), default=0)
    run = ground.run(faults, spares=spares)
    return judged(run, ground.reference(), faults, outcome, bound_s)


def forward(ground: Ground) -> Verdict:
    """Row 1."""
    places = (("d0", 3, 1), ("d1", 6, 2), ("d3", 9, 3))
    faults = [Fault(name, step, "forward", nth, spares=1) for name, step, nth in places]
    return replayed(ground, faults, "replayed", WARM_S)


def backward(ground: Ground) -> Verdict:
    """Row 2."""
    places = (("d0", 3, 1), ("d2", 6, 0), ("d3", 9, 3))
    faults = [Fault(name, step, "backward", nth, spares=1) for name, step, nth in places]
    return replayed(ground, faults, "replayed", WARM_S)


def update(ground: Ground) -> Verdict:
    """Row 3: before the optimizer's step, with half of the parameters updated, and after it."""
    faults = [
        Fault("d1", 3, "optimizer_step", spares=1),
        Fault("d2", 6, "in_update", spares=1),
        Fault("d0", 9, "updated", spares=1),
    ]
    return replayed(ground, faults, "replayed", WARM_S)


def before_training(ground: Ground) -> Verdict:
    """Row 4."""
    return replayed(ground, [Fault("d1", 0, "begin", spares=1)], "started anew", WARM_S)


def in_snapshot(ground: Ground) -> Verdict:
    """Row 5: half of a copy in memory, half of a file on disk, all files but no record."""
    kinds = ("snapshot", "commit", "before_record")
    places = (("d1", _copying(ground)), ("d2", 6), ("d0", 6))
    faults = [Fault(*place, kind, spares=1) for place, kind in zip(places, kinds, strict=True)]
    found = [_while_writing(ground, fault) for fault in faults]
    return together(found, "replayed; the last commit is whole")


def _copying(ground: Ground) -> int:
    """Return a step at whose end a state is copied: of steps that overlap, one that ends empty."""
    return 7 if read_plan(ground.bundle).stages.asynchronous else 3


def _while_writing(ground: Ground, fault: Fault) -> Verdict:
    words = ("--commits", "../commits", "--commit-every", "2")
    try:
        run = ground.run([fault], *words, hang_s=HANG_S, deadline_s=60.0)
    except LateError as error:
        why = f"killed at {fault.at}: it does not go on ({str(error).splitlines()[0]})"
        return Verdict(BROKEN, why, problems=(why,))
    newest = [record.step for record in CheckpointStore(run.folder / "commits").records()]
    more = [] if newest[:1] == [STEPS] else [f"commits at the end: {newest}"]
    return judged(run, ground.reference(), [fault], "", WARM_S, more=more)


def together_killed(ground: Ground) -> Verdict:
    """Row 6."""
    faults = [
        Fault("d1", 3, "forward", 2, spares=4, others=("d2",)),
        Fault("d3", 7, "forward", 1, spares=4, others=("d0", "d1", "d2")),
    ]
    return replayed(ground, faults, "two, then all four: replayed", 2.0)


def while_replaying(ground: Ground) -> Verdict:
    """Row 7: a device, then three of its replacements while they compute again."""
    faults = [
        Fault("d1", 5, "forward", 2, spares=4),
        Fault("d1", 4, "backward", 0, generation=1, after=0),
        Fault("d1", 4, "forward", 3, generation=2, after=1),
        Fault("d1", 4, "backward", 2, generation=3, after=2),
    ]
    return replayed(ground, faults, "replayed by the fourth process", WARM_S)


def in_join(ground: Ground) -> Verdict:
    """Row 8: 50 ms later; and between having met and being connected."""

    def second_death(live: Live) -> None:
        until = live.wait_struck(0) + 0.05
        while time.time() < until:
            pass
        os.kill(live.pid("d2"), signal.SIGKILL)

    faults = [Fault("d1", 3, "forward", 2, spares=3)]
    first = ground.run(faults, spares=3, during=second_death)
    more = [] if len(first.of("died")) == 2 else ["the second process was not killed"]
    apart = judged(first, ground.reference(), faults, "", 2.0, _all_formed(first), more)
    faults = [
        Fault("d1", 3, "forward", 1, spares=2),
        Fault("d2", 1, "ready", after=0),
        Fault("d0", 7, "forward", 1, after=1),
        Fault("d3", 3, "addressed", after=2),
    ]
    second = ground.run(faults, spares=2)
    between = judged(second, ground.reference(), faults, "", 20.0)
    return together((apart, between), "50 ms apart, and twice while connecting: replayed")


def _all_formed(run: Run) -> float | None:
    """Return the time from the first strike to the first connections after the last death."""
    last = max((e["time"] for e in run.of("died")), default=0.0)
    formed = [e["time"] for e in run.of("formed") if e["time"] >= last]
    return min(formed) - run.struck[0] if formed and run.struck else None


def no_spare(ground: Ground) -> Verdict:
    """Row 9."""
    return replayed(ground, [Fault("d1", 3, "forward", 2)], "replaced by a cold process", COLD_S)


def hopeless(ground: Ground) -> Verdict:
    """Row 10: the budget of restarts is spent; the same error comes twice."""
    faults = [Fault("d1", 3, "forward", 1), Fault("d2", 6, "forward", 1)]
    spent = ground.run(faults, "--restarts", "1", spares=0)
    faults = [Fault("d1", 3, "forward", 1, "raise")] * 2
    again = ground.run(faults, spares=0)
    return together(
        (_stop(spent, "d2", 6, "1 restarts within"), _stop(again, "d1", 3, "the same error")),
        "stopped; device, step and reason are named",
    )


def _stop(run: Run, device: str, step: int, reason: str) -> Verdict:
    at = run.struck.get(1)
    ended_s = run.ended_s - at if at else None
    last = [line for line in run.said.splitlines() if re.match(r"error(\[BX\w+\])?: ", line)]
    named = f"{device} was killed" in run.said or f"{device} ended" in run.said
    checks = {
        f"exit code {run.code}": run.code == 1,
        f"the error is not named: {last}": any(device in x and reason in x for x in last),
        f"the step is not named: {last}": named and f"in step {step}" in run.said,
    }
    return stopped(run, "", checks, ended_s, 5.0)


def hang(ground: Ground) -> Verdict:
    """Row 11: one that computes, and one that waits for a message."""
    faults = [
        Fault("d1", 3, "forward", 1, "stop", spares=1),
        Fault("d0", 7, "begin", 0, "stop_others", spares=1, others=("d3",)),
    ]
    run = ground.run(faults, hang_s=HANG_S)
    outcome = f"ended after T_hang = {HANG_S:g} s, replayed"
    return judged(run, ground.reference(), faults, outcome, HANG_S + 1.0)


def slow(ground: Ground) -> Verdict:
    """Row 13."""
    faults = [Fault("d1", 3, "forward", 1, "sleep", seconds=0.5 * HANG_S)]
    run = ground.run(faults, hang_s=HANG_S, spares=0)
    more = [] if [e["device"] for e in run.of("slow")] == ["d1"] else ["no warning of d1"]
    more += [f"ended for no reason: {event}" for event in (*run.of("hang"), *run.of("died"))]
    return judged(run, ground.reference(), faults, "a warning, nothing else", None, more=more)


def corrupt_message(ground: Ground) -> Verdict:
    """Row 19: one bit of an activation flips on its way."""
    faults = [Fault("d1", 3, "send", 1, "corrupt", spares=1)]
    run = ground.run(faults)
    told = [event["text"] for event in run.of("links_lost")]
    more = [] if any("checksum" in text for text in told) else [f"not noticed: {told}"]
    formed = [event["time"] for event in run.of("formed") if event["generation"] > 0]
    took_s = formed[0] - run.struck[0] if formed and run.struck else None
    return judged(run, ground.reference(), faults, "noticed, sent again", WARM_S, took_s, more)


def not_a_number(ground: Ground) -> Verdict:
    """Row 20: where steps overlap, the first forwards of a step's batch were in the one before."""
    faults = [Fault("d1", 3, "forward", 1, "nan")]
    own = next(lines for (name, _), lines in ground.reference().lines.items() if name == "d1")
    micro = f"micro-batch {1 + per_step(own)[1]}"
    run = ground.run(faults, spares=0)
    took_s = run.ended_s - run.struck[0] if run.struck else None
    named = all(word in run.said for word in ("step 3, stage", micro, "not a finite"))
    checks = {
        f"step, stage or micro-batch is not named: {run.said[-300:]}": named,
        f"exit code {run.code}": run.code == 1,
        "it was tried again": not run.of("assigned"),
        f"steps after it were run: {sorted(run.losses)}": max(run.losses, default=0) <= 3,
    }
    return stopped(run, "stopped; step, stage and micro-batch are named", checks, took_s, 5.0)
