"""Rows 32, 33, 36: deaths in replicas, whose states come from peers; nobody takes a snapshot."""

from __future__ import annotations

from dataclasses import replace

from tools.conformance.faults.bundle import Fault, devices_of, make_bundle
from tools.conformance.faults.rows_processes import WARM_S
from tools.conformance.faults.verdicts import (
    Ground,
    Verdict,
    judged,
    losses_differ,
    stopped,
    times_of,
    together,
)

MOST_AGAIN = 1  # steps
LATE_S = 400.0  # four spares must get warm, one after another


def of_any_replica(ground: Ground) -> Verdict:
    """Row 32: in a forward, after the last gradients have left, before the update, and after it."""
    here = replicated(ground)
    places = (("d0", 3, "forward"), ("d3", 5, "sum_gradients"), ("d1", 7, "optimizer_step"))
    faults = [Fault(*place, spares=1) for place in (*places, ("d2", 9, "updated"))]
    run = here.run(faults, spares=1, every=None, deadline_s=LATE_S)
    took = [event["device"] for event in run.of("took_state")]
    again = [event["steps"] for event in run.of("caught_up")]
    checks = {
        f"states were taken by {took}": took == [fault.device for fault in faults],
        "snapshots were taken": not run.of("snapshot"),
        f"steps again: {again}": max(again, default=0) <= MOST_AGAIN,
    }
    more = [text for text, holds in checks.items() if not holds]
    outcome = "the peer's state, no snapshot"
    return judged(run, here.reference(), faults, outcome, WARM_S, more=more)


def while_giving(ground: Ground) -> Verdict:
    """Row 33: the only peer dies as it gives its state away, with commits and without."""
    found = [_orphaned(replicated(ground), commits) for commits in (True, False)]
    return together(found, "said; all go on from the newest commit, or begin again")


def lost_for_good(ground: Ground) -> Verdict:
    """Row 36: a device dies and no process may be started: the other replica goes on alone."""
    ground.require_without("going on without a replica", "offload")
    here = replicated(ground)
    faults = [Fault("d3", 5, "forward")]
    words = ("--elastic", "--restarts", "0")
    run = here.run(faults, *words, spares=0, every=None, deadline_s=LATE_S)
    expected = here.reference()
    left = {name: expected.hashes[name] for name in ("d0", "d1")}
    bits, (strike,) = run.hashes == left, times_of(run, faults)
    checks = {
        f"exit code {run.code}": run.code == 0,
        "other bits at the end": bits,
        "a process was started": len(run.of("started")) == len(here.names),
        f"lost: {run.of('replica_lost')}": [e["step"] for e in run.of("replica_lost")] == [5],
        **dict.fromkeys(losses_differ(run, expected), False),
    }
    outcome = "the others compute what it would have, in the same processes"
    found = stopped(run, outcome, checks, strike.formed_s, WARM_S)
    return replace(found, strikes=(strike,), same_bits=bits)


def _orphaned(here: Ground, commits: bool) -> Verdict:
    words = ("--commits", "../commits", "--commit-every", "2") if commits else ()
    faults = [Fault("d0", 5, "forward", 1, spares=2), Fault("d2", 1, "giving", after=0)]
    run = here.run(faults, *words, spares=2, every=None, deadline_s=LATE_S)
    back = [event["step"] for event in run.of("rolled_back")]
    checks = {
        "nobody said that a state is lost": len(run.of("state_lost")) == 1,
        f"all went back to {back}": len(back) == 1
        and (2 <= back[0] <= 4 if commits else not back[0]),
    }
    more = [text for text, holds in checks.items() if not holds]
    return judged(run, here.reference(), faults, "", None, more=more)


def replicated(ground: Ground) -> Ground:
    """Return the ground of a bundle with two replicas, made once: d0 and d1, d2 and d3."""
    ground.require_without("a replica", "asynchronous")
    folder = ground.folder / "replicas"
    if not (folder / "made" / "bundle").exists():
        options = replace(ground.options, replicas=2, sum_order="tree")
        make_bundle(folder / "made", options=options)
    bundle = folder / "made" / "bundle"
    known = sum(1 for each in folder.iterdir() if each.name.startswith("run-"))
    return Ground(folder, bundle, devices_of(bundle), count=known)
