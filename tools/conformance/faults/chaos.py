"""Random strikes of all kinds in a long run: the bits at the end are as if nothing had happened.

Devices are killed and stopped, the supervisor is asked to end the run (which is then gone on with
from its newest commit), and the commits' disk is full for a while.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.conformance.faults.bundle import BUNDLES, Fault
from tools.conformance.faults.figures import Figures
from tools.conformance.faults.jobs import Run, launch_words, run_job
from tools.conformance.faults.verdicts import (
    Ground,
    Times,
    ground,
    last_line,
    losses_differ,
    same_bits,
    times_of,
)

SPARE_S = 6.0
HANG_S = 10.0
SECONDS_A_STRIKE, SECONDS_A_STEP, SECONDS_MORE = 40.0, 1.0, 120.0
KINDS = ("kill",) * 14 + ("stop",) + ("end_run",) * 2 + ("disk",) * 3
FULL, FREE = ("touch", "faults/full"), ("rm", "-f", "faults/full")
COMMIT_EVERY = 5


@dataclass(frozen=True)
class Ended:
    """All runs of a training that was asked to end now and then: `last` has all that happened."""

    last: Run
    losses: Mapping[int, float]
    runs: int
    problems: tuple[str, ...]


def measure(strikes: int, steps: int, seed: int, bundle: str = "1f1b") -> Figures:
    """Strike so often, in so many steps of one of the bundles."""
    with ground(options=BUNDLES[bundle]) as here:
        return _measured(here, strikes, steps, seed)


def _measured(here: Ground, strikes: int, steps: int, seed: int) -> Figures:
    reference = here.reference(steps)
    most = {device: lines[0]["instructions"] for (device, _), lines in reference.lines.items()}
    faults = drawn(most, strikes, steps, seed)
    ended = _trained(here, faults, steps)
    run = ended.last
    missed = [number for number in range(len(faults)) if number not in run.struck]
    bits = same_bits(run, reference)
    wrong = [step for step, loss in ended.losses.items() if reference.losses.get(step) != loss]
    checks = {
        f"faults {missed} did not strike": not missed,
        "other bits at the end": bits,
        f"the losses of steps {wrong} differ": not wrong,
        f"{len(ended.losses)} of {steps} losses were told": len(ended.losses) == steps,
        **{text: False for text in losses_differ(run, reference)},
    }
    problems = (*ended.problems, *(text for text, holds in checks.items() if not holds))
    killed = times_of(run, _only_kills(faults))
    warm = [e for e in run.of("assigned") if e["warm"]]
    kinds = Counter(_kind(faults[number]) for number in run.struck)
    facts = {
        "strikes": len(run.struck),
        "kinds": dict(kinds),
        "steps": steps,
        "seed": seed,
        "runs": ended.runs,
        "deaths": len(run.of("died")),
        "taken_over_warm": len(warm),
        "commits_missed": len(run.of("missed")),
        "same_bits": bits,
        "formed_s": _spread(killed),
        "warm_formed_s": _spread(_warm(run, killed)),
        "took_s": round(run.ended_s - run.started_s, 1),
        "problems": problems,
    }
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    text = (
        f"{len(run.struck)} strikes drawn from seed {seed} in {steps} steps ({said}): "
        f"{len(run.of('died'))} deaths, {len(warm)} of them taken over by a warm spare, "
        f"{len(run.of('missed'))} commits missed, {ended.runs} runs, one after another, each from "
        f"the commit of the one before: same bits {'yes' if bits else 'NO'}; kill to connections "
        f"{facts['formed_s']} s (median, most), {facts['warm_formed_s']} s of those that a warm "
        f"spare answered; {facts['took_s']} s in all."
    )
    return Figures("Chaos", "\n".join((text, *problems)), facts, not problems)


def _trained(here: Ground, faults: Sequence[Fault], steps: int) -> Ended:
    """Train to the last step, again and again from the newest commit."""
    folder = here.fresh(faults, steps)
    commits = folder / "commits"
    given = ("--commits", str(commits), "--commit-every", str(COMMIT_EVERY))
    words = launch_words(steps, "--restarts", "1000", *given, hang_s=HANG_S)
    patience_s = SECONDS_A_STRIKE * len(faults) + SECONDS_A_STEP * steps + SECONDS_MORE
    begun_s, until = time.time(), time.monotonic() + patience_s
    losses, problems, runs = dict[int, float](), list[str](), 0
    while True:
        more = ("--resume",) if runs else ()
        (folder / "bundle" / "faults" / "full").unlink(missing_ok=True)  # it would be refused
        run = run_job(folder, (*words, *more), until - time.monotonic())
        runs += 1
        losses |= run.losses
        problems += _problems(run, runs)
        if run.code or run.of("finished"):
            return Ended(replace(run, started_s=begun_s), losses, runs, tuple(problems))


def _problems(run: Run, number: int) -> list[str]:
    checks = {
        f"run {number}: exit code {run.code}: {last_line(run.said)}": run.code == 0,
        f"run {number}: processes {run.orphans} were left": not run.orphans,
    }
    return [text for text, holds in checks.items() if not holds]


def drawn(most: Mapping[str, int], strikes: int, steps: int, seed: int) -> list[Fault]:
    """Return so many different places, and what happens there: a device, a step, an instruction.

    Every second one waits for a warm spare, some seconds at most; the others come when they come.
    A disk that was full has room again at the next strike of its kind.
    """
    dice = random.Random(seed)
    places: set[tuple[str, int, int]] = set()
    while len(places) < strikes:
        device = dice.choice(sorted(most))
        places.add((device, dice.randrange(steps), dice.randrange(most[device])))
    found = list[Fault]()
    is_full = False
    for number, (device, step, nth) in enumerate(sorted(places, key=lambda place: place[1:])):
        kind = dice.choice(KINDS)
        fault = Fault(device, step, "any", nth, kind)
        if kind == "kill":
            fault = replace(fault, spares=number % 2, spares_s=SPARE_S)
        elif kind == "disk":
            fault = replace(fault, what="run", words=FREE if is_full else FULL)
            is_full = not is_full
        found.append(fault)
    return found


def _kind(fault: Fault) -> str:
    names = {"kill": "SIGKILL", "stop": "SIGSTOP", "end_run": "SIGTERM to the supervisor"}
    return names.get(fault.what, "disk full" if fault.words == FULL else "disk free")


def _only_kills(faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults with all but kills as marks: only what dies at once has a time."""
    return [
        fault if fault.what == "kill" else Fault(fault.device, fault.step, fault.at, what="mark")
        for fault in faults
    ]


def _warm(run: Run, strikes: Sequence[Times]) -> list[Times]:
    """Return the times of the kills that a warm spare answered: by the event that came next."""
    found = []
    for strike in strikes:
        later = (e for e in run.of("assigned") if e["device"] == strike.device)
        event = next((e for e in later if e["time"] >= strike.at), None)
        if event is not None and event["warm"]:
            found.append(strike)
    return found


def _spread(strikes: Sequence[Times]) -> str:
    found = [t.formed_s for t in strikes if t.formed_s is not None]
    return f"{statistics.median(found):.2f}, {max(found):.2f}" if found else "-"
