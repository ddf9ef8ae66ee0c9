"""References for runs with faults, and their verdicts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.limits import SHARE_GPUS
from tools.conformance.faults.bundle import (
    PIPELINE,
    SMALL,
    Fault,
    Size,
    devices_of,
    make_bundle,
    with_faults,
)
from tools.conformance.faults.jobs import During, Run, launch_words, run_job

STEPS, EVERY = 12, 2
DEADLINE_S = 150.0

KEPT, BROKEN, NOT_BUILT, SKIPPED = "kept", "broken", "not built", "skipped"


class DoesNotGoError(Exception):
    """A row asks for what the bundle that is struck cannot have."""


@dataclass(frozen=True)
class Times:
    """One strike; seconds are from its moment `at` (since 1970), None: that did not happen."""

    device: str
    detected_s: float | None
    formed_s: float | None
    caught_up_s: float | None
    steps_again: int | None
    at: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of a row.

    Attributes:
        status: kept, broken, not built, or skipped (24 only).
        outcome: what happened, in a few words.
        strikes: the times of each.
        measured_s, bound_s: what the bound of the matrix is about; None where it has none.
        same_bits: parameters, optimizer state and the rest, against the run where nothing happened.
        survivors_kept: who did not die kept its process and did every forward once.
        problems: why it is not kept.
    """

    status: str
    outcome: str
    strikes: tuple[Times, ...] = ()
    measured_s: float | None = None
    bound_s: float | None = None
    same_bits: bool | None = None
    survivors_kept: bool | None = None
    problems: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


@dataclass
class Ground:
    """A bundle and its undisturbed run, for any number of runs with faults.

    The reference is all devices in one process: nothing of replay takes part in it.
    `environment` is of each supervised run, `options` those that the bundle was split with.
    """

    folder: Path
    bundle: Path
    names: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    references: dict[int, Run] = field(default_factory=dict)
    count: int = 0
    options: Options = PIPELINE

    def require_without(self, what: str, *options: str) -> None:
        """Leave a row out that needs what does not go with some options.

        Raises:
            DoesNotGoError: the bundle was split with one of them.
        """
        for name in options:
            if getattr(self.options, name):
                raise DoesNotGoError(f"skipped: {what} does not go with --{name}")

    def fresh(self, faults: Sequence[Fault] = (), steps: int = STEPS, block: int = 0) -> Path:
        """Return a new folder with a copy of the bundle in which faults are planned."""
        self.count += 1
        folder = self.folder / f"run-{self.count}"
        folder.mkdir()
        with_faults(self.bundle, folder, faults, steps, block)
        return folder

    def run(
        self,
        faults: Sequence[Fault] = (),
        *more: str,
        steps: int = STEPS,
        spares: int = 1,
        hang_s: float = 20.0,
        during: During | None = None,
        prefix: Sequence[str] = (),
        deadline_s: float = DEADLINE_S,
        every: int | None = EVERY,
    ) -> Run:
        """Run it under its supervisor, as a user does, with faults; `every` None: as it chooses."""
        words = launch_words(steps, *more, spares=spares, hang_s=hang_s)
        if every is not None:
            words = (*words, "--snapshot-every", str(every))
        folder, words = self.fresh(faults, steps), (*prefix, *words)
        return run_job(folder, words, deadline_s, during, self.environment)

    def in_process(self, *more: str, steps: int = STEPS) -> Run:
        """Run all its devices in one process."""
        words = (sys.executable, "train.py", "--in-process", "--json", "--steps", str(steps))
        return run_job(self.fresh((), steps), (*words, *more), DEADLINE_S)

    def reference(self, steps: int = STEPS) -> Run:
        """Return the run where nothing happened."""
        if steps not in self.references:
            made = self.in_process(steps=steps)
            if made.code or set(made.hashes) != set(self.names):
                raise RuntimeError(f"the undisturbed run failed:\n{made.said[-2000:]}")
            self.references[steps] = made
        return self.references[steps]


@contextmanager
def ground(size: Size = SMALL, options: Options = PIPELINE) -> Iterator[Ground]:
    """Make a bundle in a temporary folder, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        bundle = make_bundle(Path(name) / "made", size, options=options)
        yield Ground(Path(name), bundle, devices_of(bundle), options=options)


@contextmanager
def ground_of_gpus(devices: int = 2, kind: Literal["cpu", "cuda"] = "cuda") -> Iterator[Ground]:
    """Make a bundle of GPUs whose processes share those that this host has, over gloo.

    Its reference is a supervised run in which nothing happens: one process would compute on the
    CPU, whose bits are others.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        bundle = make_bundle(Path(name) / "made", devices=devices, kind=kind)
        here = Ground(Path(name), bundle, devices_of(bundle), {SHARE_GPUS: "1"})
        here.references[STEPS] = here.run()
        yield here


# --------------------------------------------------------------------------- what is looked at


def times_of(run: Run, faults: Sequence[Fault]) -> tuple[Times, ...]:
    """Return the times of all strikes that ended or stopped a process."""
    found = []
    for number, at in sorted(run.struck.items()):
        fault = faults[number]
        if fault.what in ("kill", "stop", "stop_others", "run"):
            found += [_times(run, at, device) for device in _struck_by(fault)]
    return tuple(found)


def _struck_by(fault: Fault) -> tuple[str, ...]:
    if fault.what == "stop_others":
        return fault.others
    return (fault.device, *fault.others)


def _times(run: Run, at: float, device: str) -> Times:
    def after(event: str, **facts: object) -> dict[str, Any] | None:
        later = (e for e in run.of(event) if e["time"] >= at)
        return next((e for e in later if facts.items() <= e.items()), None)

    died, formed = after("died", device=device), after("formed")
    caught_up = after("caught_up", device=device)
    return Times(
        device,
        died["time"] - at if died else None,
        formed["time"] - at if formed else None,
        caught_up["time"] - at if caught_up else None,
        int(caught_up["steps"]) if caught_up else None,
        at,
    )


def same_bits(run: Run, reference: Run) -> bool:
    """Whether parameters, optimizer state and all else are the same on every device."""
    return bool(reference.hashes) and run.hashes == reference.hashes


def losses_differ(run: Run, reference: Run) -> list[str]:
    """Return what is wrong with the losses: those reported are the same."""
    wrong = [step for step, loss in run.losses.items() if reference.losses.get(step) != loss]
    return [f"the losses of steps {wrong} differ"] if wrong else []


def survivors_kept(run: Run, reference: Run) -> bool:
    """Whether processes count their steps and forwards up, one by one, and none is replaced unhurt.

    The forwards of a device that never died are those of the undisturbed run, step by step.
    """
    deaths: dict[str, int] = {}
    for event in run.of("died"):
        deaths[event["device"]] = deaths.get(event["device"], 0) + 1
    theirs = {device: lines for (device, _), lines in reference.lines.items()}
    processes: dict[str, list[Sequence[Mapping[str, Any]]]] = {name: [] for name in theirs}
    for (device, _), lines in run.lines.items():
        if lines:  # it was stopped as it wrote its first one
            processes[device].append(lines)
    return all(
        found  # else nothing was left to do: the fault came too late
        and len(found) <= 1 + deaths.get(name, 0)
        and all(map(_counts_up, found))
        and (name in deaths or _same_forwards(_forwards(found[0]), _forwards(theirs[name])))
        for name, found in processes.items()
    )


def _counts_up(lines: Sequence[Mapping[str, Any]]) -> bool:
    steps = [line["step"] for line in lines]
    forwards = _forwards(lines)
    rises = all(a < b for a, b in pairwise(forwards))
    return rises and steps == list(range(steps[0], steps[0] + len(steps)))


def per_step(lines: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the forwards of a step, and how many of the next batch's are done in the first one."""
    first, *more = _forwards(lines)
    each = more[0] - first if more else first
    return each, max(0, first - each)


def _same_forwards(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether as many were done, step by step, but for those of the next batch.

    Steps that overlap begin with more; where processes are replaced some end with none under way.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        return list(ours) == list(theirs)
    ahead = max(0, theirs[0] - (theirs[1] - theirs[0]))
    is_near = all(0 <= b - a <= ahead for a, b in zip(ours, theirs, strict=True))
    return is_near and ours[-1] == theirs[-1]


def _forwards(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    return [line["forwards"] for line in lines]


# --------------------------------------------------------------------------- judging


def judged(
    run: Run,
    reference: Run,
    faults: Sequence[Fault],
    outcome: str,
    bound_s: float | None = None,
    measured_s: float | None = None,
    more: Sequence[str] = (),
) -> Verdict:
    """Judge a run that must end as if nothing had happened.

    Args:
        run: with the faults.
        reference: without.
        faults: all that were planned; all must have struck.
        outcome: what to say if all is well.
        bound_s: of `measured_s`, or else of the longest time from a strike to connections.
        measured_s: another time.
        more: problems that the caller has found.
    """
    strikes = times_of(run, faults)
    formed = [t.formed_s for t in strikes if t.formed_s is not None]
    longest = measured_s if measured_s is not None else max(formed, default=None)
    bits, kept = same_bits(run, reference), survivors_kept(run, reference)
    problems = [*more, *losses_differ(run, reference)]
    missed = [number for number in range(len(faults)) if number not in run.struck]
    checks = {
        f"exit code {run.code}: {last_line(run.said)}": run.code == 0,
        f"faults {missed} did not strike": not missed,
        "other bits at the end": bits,
        "a survivor was replaced, or did a forward twice": kept,
        f"processes {run.orphans} were left": not run.orphans,
        f"temporary files were left: {[p.name for p in run.leftovers]}": not run.leftovers,
        f"{longest} s is over {bound_s} s": not over(longest, bound_s),
    }
    problems = [*(text for text, holds in checks.items() if not holds), *problems]
    status, outcome = _settled(outcome, problems)
    return Verdict(status, outcome, strikes, longest, bound_s, bits, kept, tuple(problems))


def _settled(outcome: str, problems: Sequence[str]) -> tuple[str, str]:
    """Return the status, and the outcome: the first problem in place of what was hoped for."""
    if not problems:
        return KEPT, outcome
    return BROKEN, problems[0].splitlines()[0][:160]


def over(measured_s: float | None, bound_s: float | None) -> bool:
    """Whether a bound is broken: what was not measured breaks it, too."""
    return bound_s is not None and (measured_s is None or measured_s > bound_s)


def stopped(
    run: Run, outcome: str, checks: Mapping[str, bool], measured_s: float | None, bound_s: float
) -> Verdict:
    """Judge a run that must have stopped."""
    all_checks = {
        **checks,
        f"processes {run.orphans} were left": not run.orphans,
        f"temporary files were left: {[p.name for p in run.leftovers]}": not run.leftovers,
        f"{measured_s} s is over {bound_s} s": not over(measured_s, bound_s),
    }
    problems = tuple(text for text, holds in all_checks.items() if not holds)
    status, outcome = _settled(outcome, problems)
    return Verdict(status, outcome, (), measured_s, bound_s, problems=problems)


def together(verdicts: Sequence[Verdict], outcome: str) -> Verdict:
    """Return one verdict of several runs: kept if all are; the time nearest to its bound."""

    def share(verdict: Verdict) -> float:
        return (verdict.measured_s or 0.0) / (verdict.bound_s or 1e9)

    worst = max(verdicts, key=share)
    bits = [v.same_bits for v in verdicts if v.same_bits is not None]
    kept = [v.survivors_kept for v in verdicts if v.survivors_kept is not None]
    broken = [v.outcome for v in verdicts if v.status != KEPT]
    return Verdict(
        BROKEN if any(v.status != KEPT for v in verdicts) else KEPT,
        "; ".join(broken) or outcome,
        tuple(t for v in verdicts for t in v.strikes),
        worst.measured_s,
        worst.bound_s,
        all(bits) if bits else None,
        all(kept) if kept else None,
        tuple(problem for v in verdicts for problem in v.problems),
    )


def last_line(text: str) -> str:
    """Return the last line that says something of an error, else the last one."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["nothing was said"])[-1][:200]
