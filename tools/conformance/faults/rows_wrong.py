"""Rows 34 and 35: results that are wrong and finite, which a spare finds by computing again."""

from __future__ import annotations

from dataclasses import replace

from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import Run
from tools.conformance.faults.verdicts import EVERY, Ground, Verdict, judged, stopped

END_S = 30.0
LATE_S = 400.0  # all processes start again after each
ALL = ("--suspect", "1")


def once(ground: Ground) -> Verdict:
    """Row 34: one activation, and later one gradient, 1.5 times what it should be."""
    ground.require_without("--suspect", "asynchronous", "offload")
    places = ("d1", 3, "send_activation"), ("d3", 8, "send_gradient")
    faults = [Fault(*place, what="wrong") for place in places]
    run = ground.run(faults, *ALL, deadline_s=LATE_S)
    found = [(e["device"], e["step"], e["text"].split()[3]) for e in run.of("suspect")]
    back = [event["step"] for event in run.of("rolled_back")]
    checks = {
        f"suspected: {found}": found == [("d1", 3, "activation"), ("d3", 8, "gradient")],
        f"all went back to {back}": back == [3 // EVERY * EVERY, 8],
        "steps were not checked": not run.of("unchecked"),
    }
    more = [text for text, holds in checks.items() if not holds]
    outcome = "device and step named; all go back to the snapshot before"
    verdict = judged(run, ground.reference(), faults, outcome, more=more)
    return replace(verdict, survivors_kept=None)  # nobody is one: all go back


def for_ever(ground: Ground) -> Verdict:
    """Row 35: a device that is wrong again when a step is done again."""
    ground.require_without("--suspect", "asynchronous", "offload")
    first = 5
    faults = [Fault("d2", first, "send", 0, "wrong")] * 2  # as it is done, and done again
    words = ("--commits", "../commits", "--commit-every", "1", *ALL)
    run = ground.run(faults, *words, deadline_s=LATE_S)
    newest = _newest_commit(run)
    checks = {
        f"exit code {run.code}": run.code == 1,
        "it does not say who": f"device d2 computed in step {first}" in run.said,
        f"the newest commit is of step {newest}": newest == first,
    }
    took_s = run.ended_s - run.struck[1] if 1 in run.struck else None
    return stopped(run, "stopped; device named, nothing wrong committed", checks, took_s, END_S)


def _newest_commit(run: Run) -> int:
    records = (run.folder / "commits").glob("commit-*.json")
    return max((int(path.stem.split("-")[1]) for path in records), default=-1)
