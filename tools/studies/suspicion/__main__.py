"""What computing steps again finds of wrong but finite results, by share of steps, and its cost.

    python -m tools.studies.suspicion --write results.md [--trials 60] [--rounds 12]
        [--pairs 3]

A GPT on four devices of one process is trained with one wrong result in it, at a place that is
drawn; `tests.support.taped` has the bundle's own tapes and checks. Found and not found are counted.
Costs are processor time, in rounds of a run without and one with each share, in turn; at the end
supervised runs, a process per device and a spare.
"""

from __future__ import annotations

import math
import random
import resource
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from tests.support.taped import Counted, Rig, Wrong
from tools.conformance.faults.bundle import Size, make_bundle
from tools.conformance.faults.jobs import launch_words, run_job
from tools.conformance.faults.verdicts import DEADLINE_S, Ground, ground
from tools.conformance.matrix import imported

KINDS = ("activation", "gradient", "bit", "weight")
DEVICES = ("d0", "d1", "d2", "d3")
RATES = (0.05, 0.1, 0.25, 0.5, 1.0)
STEPS = 12  # of a run with one wrong result
COSTED = Size(width=128, blocks=4, words=512, length=64)
MOST = 30  # steps of a device that is wrong from its first step on
COST_STEPS, LAUNCHED_STEPS, LAUNCHED_RATE = 8, 40, 0.25


def drawn_wrong(dice: random.Random, kind: str, steps: int) -> Wrong:
    """Draw the place of a wrong result; the first device sends no gradient, the last only those."""
    able = {"activation": DEVICES[:-1], "gradient": DEVICES[1:]}.get(kind, DEVICES)
    return Wrong(dice.choice(able), dice.randrange(steps), kind, dice.randrange(100))


@dataclass(frozen=True)
class Tally:
    """Trials with one wrong result each: found with its device and step; blamed on another."""

    found: int
    trials: int
    blamed: int
    checked: int

    @classmethod
    def of(cls, runs: Sequence[tuple[Wrong, Counted]]) -> Tally:
        """Count; a run in which the wrong result did not come about is an error."""
        for wrong, counted in runs:
            if wrong not in counted.struck:
                raise RuntimeError(f"{wrong} found no place")
        places = [((w.device, w.step), c) for w, c in runs]
        return cls(
            sum(place in c.found for place, c in places),
            len(runs),
            sum(len(c.found.keys() - {place}) for place, c in places),
            sum(len(c.checked) for _, c in runs),
        )


def by_kind(rig: Rig, trials: int) -> Mapping[str, Tally]:
    """Check every step: whatever is wrong, and however little, is found at its device and step."""
    dice = random.Random(1)
    return {
        kind: Tally.of([_trial(rig, drawn_wrong(dice, kind, STEPS), 1.0, n) for n in range(trials)])
        for kind in KINDS
    }


def by_rate(rig: Rig, trials: int) -> Mapping[float, Tally]:
    """Check a share of the steps: a result that is wrong once is found as often as its step is."""
    dice = random.Random(2)
    return {
        rate: Tally.of(
            [_trial(rig, drawn_wrong(dice, "bit", STEPS), rate, n) for n in range(trials)]
        )
        for rate in RATES
    }


def _trial(rig: Rig, wrong: Wrong, rate: float, draw: int) -> tuple[Wrong, Counted]:
    return wrong, rig.run(wrong.step + 1, rate, [wrong], draw)


def until_found(rig: Rig, rate: float, trials: int, most: int) -> list[int | None]:
    """Let a device be wrong from its first step on; return how many of its steps that took."""
    found: list[int | None] = []
    for draw in range(trials):
        name = DEVICES[draw % len(DEVICES)]
        wrongs = [Wrong(name, step, "bit") for step in range(most)]
        first = sorted(step for _, step in rig.run(most, rate, wrongs, draw).found)
        found.append(first[0] + 1 if first else None)
    return found


# --------------------------------------------------------------------------- costs


@dataclass(frozen=True)
class Cost:
    """Processor time more than without, as a share: of devices (tapes), of spares (checks)."""

    tape: float
    check: float


def costs(rig: Rig, rounds: int) -> Mapping[float, list[Cost]]:
    """Run all shares in turn, so many times; each round has its own run without."""
    found: dict[float, list[Cost]] = {rate: [] for rate in RATES}
    for number in range(rounds + 1):
        plain_s = rig.run(COST_STEPS, 0.0).plain_s
        for rate in random.Random(number).sample(RATES, len(RATES)):
            counted = rig.run(COST_STEPS, rate, draw=number)
            if number:  # the first is slower
                cost = Cost(counted.tape_s / plain_s, counted.check_s / plain_s)
                found[rate].append(cost)
    return found


def launched(pairs: int) -> list[float]:
    """Return the processor time of supervised runs with checks over that without, by pair."""
    with ground(COSTED) as here:
        return [_with(here) / _without(here) for _ in range(pairs)]


def _with(here: Ground) -> float:
    return _processor_s(here, "--suspect", str(LAUNCHED_RATE))


def _without(here: Ground) -> float:
    return _processor_s(here)


def _processor_s(here: Ground, *more: str) -> float:
    """Run it under its supervisor; return the processor time of all its processes together."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = launch_words(LAUNCHED_STEPS, "--snapshot-every", "4", *more, hang_s=120.0)
    run = run_job(here.fresh((), LAUNCHED_STEPS), words, 4 * DEADLINE_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.code or run.of("suspect") or run.of("unchecked"):
        raise RuntimeError(f"the run ended with {run.code}:\n{run.said[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# --------------------------------------------------------------------------- the page

PAGE = """# Suspicion: steps that are computed again

Written by `python -m tools.studies.suspicion --write results.md --trials {trials}
--rounds {rounds} --pairs {pairs}`; do not edit.

`bigbrain-fx run BUNDLE --suspect 0.1` (also of the bundle's `launch.py`; the bundle is of
`split --with suspicion`) lets a spare compute a
tenth of all devices' steps again. A step of a device is a function of its state, its batch and the
messages it receives; the device keeps those (a tape) and checksums of what it sends and of its
state after the step. A spare computes the same step from the tape and compares: bit by bit, so
that the lowest bit of one number is as much as a number that is not finite. Which steps are
checked is drawn by seed, device and step.

What would be kept of a step (a snapshot of all devices, a commit, the files of `--save`) counts
once the checked steps before it came out the same. Where one did not, the device, the step and the
message are named (event `suspect`), the device's process and the spare's are ended, and all
devices go back to the newest snapshot, which is older: the wrong result is in nothing that is
kept, and the losses of the steps that are done again are told again. The same difference at the
same step a second time ends the run; with `--elastic` it goes on without that device. Rows 34 and
35 of [the fault matrix](../fault_costs/results.md) are such runs.

What it does not see: a step that is not drawn. If a device was wrong before, its state is wrong
already when a later step is taped, and that step is computed alike; a device that goes on
computing wrong is found, and what it did before that, since its first wrong step, is not undone
further back than the newest snapshot. A share of 1 sees every step. Two processes that are wrong
alike (the same faulty core, a bug) agree. Not for GPUs, `--asynchronous`, offloading, functions in
`on_step_begin`, several hosts.

The model: the GPT of the fault matrix (dropout, tied weight, clipping) on four devices, 1F1B.

## What is found: one wrong result, every step checked

Each row: {trials} runs, one wrong result in each, its device, step and message drawn. *Blamed*
counts steps and devices that were named and had nothing wrong in them.

| wrong | found at its device and step | blamed | checked |
|---|---:|---:|---:|
{kinds}

Without anything wrong: {quiet_found} differences in {quiet_checked} checked steps.

## By share of steps

*Once*: one bit is wrong in one step, {trials} runs a share; what is found is the share of steps
that are drawn (95 % interval, Wilson). *From then on*: a device is wrong in every step; how many
of its steps that took, over {persistent} runs (median, nine of ten; at most {most} steps were run,
`-`: not by then).

| `--suspect` | once: found | blamed | from then on: steps until found | 9 of 10 |
|---:|---:|---:|---:|---:|
{rates}

## What it costs

Processor time more than without, of all four devices together: medians of {rounds} rounds
(quartiles) in one process, {cost_steps} steps each. *Tapes* are on the devices (a copy of the
state, of the batch and of what was received; checksums of the state); *checks* are the spare's.
The state is {state_mb:.1f} MB in all, a step {step_ms:.0f} ms of processor time: where a step
computes longer with the same state, tapes cost less of it.

| `--suspect` | tapes | checks | together |
|---:|---:|---:|---:|
{costs}

Supervised, a process per device and a spare, {launched_steps} steps, a snapshot every 4,
`--suspect {launched_rate}`: all processes together take {launched} of the processor time of the
same run without ({pairs} pairs).
"""


@click.command()
@click.option("--trials", default=60, show_default=True, help="Runs a row.")
@click.option("--rounds", default=12, show_default=True, help="Of the costs.")
@click.option("--pairs", default=3, show_default=True, help="Of supervised runs.")
@click.option("--write", type=click.Path(path_type=Path), help="The page.")
def main(trials: int, rounds: int, pairs: int, write: Path | None) -> None:
    """Print the page, or write it."""
    torch.set_num_threads(1)
    page = measured(trials, rounds, pairs)
    if write is None:
        click.echo(page)
    else:
        write.write_text(page)


def measured(trials: int, rounds: int, pairs: int) -> str:
    """Measure everything; return the page."""
    most, persistent = MOST, max(8, trials // 3)
    with _rig(Size()) as rig:
        quiet = rig.run(4 * STEPS, 1.0)
        kinds, rates = by_kind(rig, trials), by_rate(rig, trials)
        lasting = {rate: until_found(rig, rate, persistent, most) for rate in RATES}
    with _rig(COSTED) as rig:
        found = costs(rig, rounds)
        step_ms = 1e3 * rig.run(COST_STEPS, 0.0).plain_s / COST_STEPS
        state_mb = _state_mb(rig)
    return PAGE.format(
        trials=trials,
        rounds=rounds,
        pairs=pairs,
        persistent=persistent,
        most=most,
        kinds="\n".join(_kind_row(kind, tally) for kind, tally in kinds.items()),
        quiet_found=len(quiet.found),
        quiet_checked=len(quiet.checked),
        rates="\n".join(_rate_row(rate, rates[rate], lasting[rate]) for rate in RATES),
        cost_steps=COST_STEPS,
        state_mb=state_mb,
        step_ms=step_ms,
        costs="\n".join(_cost_row(rate, found[rate]) for rate in RATES),
        launched_steps=LAUNCHED_STEPS,
        launched_rate=LAUNCHED_RATE,
        launched=", ".join(f"{ratio:.2f}" for ratio in launched(pairs)) or "(not measured)",
    )


@contextmanager
def _rig(size: Size) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="suspicion-") as name:
        folder = make_bundle(Path(name) / "made", size)
        with imported(folder, force_adamw=False) as bundle:
            yield Rig(bundle)


def _state_mb(rig: Rig) -> float:
    """Return the size of all devices' states: weights and AdamW's two copies."""
    empty = (stage.empty("meta") for cls in rig.bundle.devices for stage in cls.stages.values())
    count = sum(p.numel() for module in empty for p in module.parameters())
    return float(3 * 4 * count / 1e6)


WORDS = {
    "activation": "an activation that is sent, 1.5 times what it is",
    "gradient": "a gradient that is sent, 1.5 times what it is",
    "bit": "the lowest bit of one number that is sent",
    "weight": "the lowest bit of one weight, after the update",
}


def _kind_row(kind: str, tally: Tally) -> str:
    return (
        f"| {WORDS[kind]} | {tally.found} of {tally.trials} | {tally.blamed} | {tally.checked:,} |"
    )


def _rate_row(rate: float, tally: Tally, lasting: Sequence[int | None]) -> str:
    low, high = wilson(tally.found, tally.trials)
    took = sorted(lasting, key=lambda n: float("inf") if n is None else n)
    middle, late = took[(len(took) - 1) // 2], took[int(0.9 * (len(took) - 1) + 0.5)]
    said = ["-" if n is None else str(n) for n in (middle, late)]
    share = f"{tally.found / tally.trials:.2f} ({low:.2f} to {high:.2f})"
    return f"| {rate:g} | {share} | {tally.blamed} | {said[0]} | {said[1]} |"


def wilson(found: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share."""
    share, more = found / trials, z * z / trials
    middle = (share + more / 2) / (1 + more)
    half = z * math.sqrt(share * (1 - share) / trials + more / trials / 4) / (1 + more)
    return max(0.0, middle - half), min(1.0, middle + half)


def _cost_row(rate: float, found: Sequence[Cost]) -> str:
    parts = [[c.tape for c in found], [c.check for c in found], [c.tape + c.check for c in found]]
    return f"| {rate:g} | " + " | ".join(map(_spread, parts)) + " |"


def _spread(shares: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(shares, n=4)
    return f"+{middle:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
