"""Random kills in a long run: the bits at the end are those of a run where nothing happened."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence

from tools.faulting.bundle import Fault
from tools.faulting.figures import Figures
from tools.faulting.jobs import Run
from tools.faulting.verdicts import Ground, Times, ground, judged

SPARE_S = 6.0
SECONDS_A_KILL, SECONDS_A_STEP, SECONDS_MORE = 20.0, 0.5, 60.0


def measure(kills: int, steps: int, seed: int) -> Figures:
    """Kill `kills` processes at instructions drawn from a seed, in so many steps."""
    with ground() as here:
        return _measured(here, kills, steps, seed)


def _measured(here: Ground, kills: int, steps: int, seed: int) -> Figures:
    reference = here.reference(steps)
    most = {device: lines[0]["instructions"] for (device, _), lines in reference.lines.items()}
    faults = drawn(most, kills, steps, seed)
    patience_s = SECONDS_A_KILL * kills + SECONDS_A_STEP * steps + SECONDS_MORE
    run = here.run(faults, "--restarts", "1000", steps=steps, deadline_s=patience_s)
    verdict = judged(run, reference, faults, "")
    warm = [e for e in run.of("assigned") if e["warm"]]
    facts = {
        "kills": len(run.struck),
        "steps": steps,
        "seed": seed,
        "deaths": len(run.of("died")),
        "taken_over_warm": len(warm),
        "same_bits": verdict.same_bits,
        "survivors_kept": verdict.survivors_kept,
        "formed_s": _spread(verdict.strikes),
        "warm_formed_s": _spread(_warm(run, verdict.strikes)),
        "took_s": round(run.ended_s - run.started_s, 1),
        "problems": verdict.problems,
    }
    text = (
        f"{len(run.struck)} kills drawn from seed {seed} in {steps} steps, {len(warm)} of them "
        f"taken over by a warm spare: same bits {_yes(verdict.same_bits)}, survivors kept "
        f"{_yes(verdict.survivors_kept)}; strike to connections {facts['formed_s']} s "
        f"(median, most), {facts['warm_formed_s']} s of those; {facts['took_s']} s in all."
    )
    passed = not verdict.problems
    return Figures("Chaos", "\n".join((text, *verdict.problems)), facts, passed)


def drawn(most: Mapping[str, int], kills: int, steps: int, seed: int) -> list[Fault]:
    """Return so many different places: a device, a step, one of its instructions.

    Every second kill waits for a warm spare, some seconds at most; the others come when they come.
    """
    dice = random.Random(seed)
    places: set[tuple[str, int, int]] = set()
    while len(places) < kills:
        device = dice.choice(sorted(most))
        places.add((device, dice.randrange(steps), dice.randrange(most[device])))
    return [
        Fault(device, step, "any", nth, spares=number % 2, spares_s=SPARE_S)
        for number, (device, step, nth) in enumerate(sorted(places))
    ]


def _warm(run: Run, strikes: Sequence[Times]) -> list[Times]:
    """Return the times of the kills that a warm spare answered: by the event that came next."""
    found = []
    for (_, at), strike in zip(sorted(run.struck.items()), strikes, strict=True):
        later = (e for e in run.of("assigned") if e["time"] >= at and e["device"] == strike.device)
        if (event := next(later, None)) is not None and event["warm"]:
            found.append(strike)
    return found


def _spread(strikes: Sequence[Times]) -> str:
    found = [t.formed_s for t in strikes if t.formed_s is not None]
    return f"{statistics.median(found):.2f}, {max(found):.2f}" if found else "-"


def _yes(value: bool | None) -> str:
    return "yes" if value else "NO"
