"""One kill, answered by a warm spare, by a cold process, and by torchrun's restart of all."""

from __future__ import annotations

import statistics

from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.figures import Figures
from tools.conformance.faults.verdicts import (
    Ground,
    Times,
    ground,
    same_bits,
    survivors_kept,
    times_of,
)
from tools.studies.fault_costs.overhead import size_for
from tools.studies.fault_costs.restart_all import Outcome, restart_all

STEPS, KILLED_AFTER, COMMIT_EVERY = 12, 5, 2
FORMED_S, COLD_S, CAUGHT_UP_S, CAUGHT_UP_STEPS = 1.0, 15.0, 1.0, 2


def measure(state_mb: float) -> Figures:
    """Kill one device of four with so much state each, after the same step, in three ways."""
    with ground(size_for(state_mb)) as here:
        every = _default_interval(here)
        warm, step_s, well = _supervised(here, every, spares=1)
        cold, _, cold_well = _supervised(here, every, spares=0)
        theirs = restart_all(here.bundle, STEPS, KILLED_AFTER, COMMIT_EVERY)
    return _figures(warm, cold, theirs, step_s, state_mb, every, well and cold_well)


def _default_interval(here: Ground) -> int:
    """Return how many steps from snapshot to snapshot a run chooses that is left to itself."""
    run = here.run((), spares=0, every=None, hang_s=60.0, deadline_s=400.0)
    chosen = [int(event["every"]) for event in run.of("snapshot")]
    return min(chosen[-1], STEPS) if chosen else STEPS  # none was due


def _supervised(here: Ground, every: int, spares: int) -> tuple[Times, float, bool]:
    """Kill a device as late after a snapshot as can be: it has `every` - 1 steps to repeat."""
    last = STEPS // every * every - 1
    faults = [Fault("d1", last, "forward", 2, spares=spares)]
    run = here.run(faults, spares=spares, every=every, hang_s=60.0, deadline_s=400.0)
    if run.code or not run.struck:
        raise RuntimeError(f"the run failed:\n{run.said[-2000:]}")
    reference = here.reference()
    well = same_bits(run, reference) and survivors_kept(run, reference)
    return times_of(run, faults)[0], statistics.median(run.step_times()), well


def _figures(
    warm: Times,
    cold: Times,
    theirs: Outcome,
    step_s: float,
    state_mb: float,
    every: int,
    well: bool,
) -> Figures:
    limit_s = CAUGHT_UP_S + CAUGHT_UP_STEPS * step_s
    kept = (
        well
        and theirs.same_bits
        and (warm.formed_s or 1e9) <= FORMED_S
        and (warm.caught_up_s or 1e9) <= limit_s
        and (cold.formed_s or 1e9) <= COLD_S
    )
    facts = {
        "state_mb": state_mb,
        "step_s": round(step_s, 3),
        "every": every,
        "warm": vars(warm),
        "cold": vars(cold),
        "torchrun": vars(theirs),
        "same_bits": well and theirs.same_bits,
        "passed": kept,
    }
    rows = [
        "| one of four killed | formed (first step again) | caught up | steps again |",
        "| --- | --- | --- | --- |",
        f"| warm spare | {_text(warm.formed_s)} s | {_text(warm.caught_up_s)} s (bound "
        f"{limit_s:.1f}) | {warm.steps_again}, of one device |",
        f"| cold process | {_text(cold.formed_s)} s | {_text(cold.caught_up_s)} s | "
        f"{cold.steps_again}, of one device |",
        f"| torchrun | {theirs.first_step_s:.2f} s | {theirs.caught_up_s:.2f} s | "
        f"{theirs.steps_again}, of all devices |",
    ]
    text = (
        f"State of about {state_mb:g} MB a device, steps of {step_s:.2f} s; a snapshot in memory "
        f"every {every} steps, as a run by itself chose, and the kill right before the next; "
        f"torchrun commits every {COMMIT_EVERY} steps. Same bits in all three: "
        f"{'yes' if facts['same_bits'] else 'NO'}.\n"
    )
    return Figures("Beside torchrun", "\n".join((text, *rows)), facts, kept)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
