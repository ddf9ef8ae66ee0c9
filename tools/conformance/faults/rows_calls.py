"""Row 31: every call that devices make to the system fails once, in as few runs as that takes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import Run, launch_words, run_job
from tools.conformance.faults.rows_processes import HANG_S
from tools.conformance.faults.rows_runs import resumed
from tools.conformance.faults.verdicts import (
    BROKEN,
    KEPT,
    STEPS,
    Ground,
    Verdict,
    last_line,
    losses_differ,
    same_bits,
    together,
)

ERROR = re.compile(r"error(\[BX\w+\])?: ")

MOST_RUNS = 8  # of a pass: each that ends before its time leaves places to the next
PASSES = (0, 2)  # the first call of each place in a process, and the third
LEAST = 25  # places
IMPORTS = "from pathlib import Path\n"
ENDS = (1, 2)  # exit codes of a run that says why it ends
DEADLINE_S = 900.0  # of a run with some thirty deaths, on a busy machine


@dataclass
class Struck:
    """The calls that have failed, and what was said by runs that ended of some."""

    calls: set[str] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)


def every_call(ground: Ground) -> Verdict:
    """Row 31: each call of a device fails once: the same bits, or an end with the newest commit."""
    struck = Struck()
    verdicts = [verdict for nth in PASSES for verdict in _pass(ground, nth, struck)]
    few = len(struck.calls) < LEAST
    verdicts.append(Verdict(BROKEN if few else KEPT, f"only {sorted(struck.calls)} were found"))
    ended = f"ended with a line and a commit: {len(struck.ends)}" if struck.ends else "no end"
    return together(verdicts, f"{len(struck.calls)} calls failed: the same bits; {ended}")


def _pass(ground: Ground, nth: int, struck: Struck) -> Iterator[Verdict]:
    marks = ground.folder / f"failing-{nth}"
    marks.mkdir()
    for _ in range(MOST_RUNS):
        before = set(marks.iterdir())
        commits = ground.folder / f"calls-{ground.count}"
        words = ("--commits", str(commits), "--commit-every", "2")
        run = _run(ground, marks, nth, words)
        fresh = {f"{mark.name}, call {nth + 1}" for mark in set(marks.iterdir()) - before}
        struck.calls |= fresh
        yield _judged(ground, run, commits, sorted(fresh))
        if run.code in ENDS:
            struck.ends.append(last_line(run.said))
            newest = _newest(commits)
            if (
                newest >= 0
            ):  # where it ended as it saved, all steps are done: two more show the bits
                yield resumed(ground, *words, steps=STEPS + 2 * (newest == STEPS))
        elif not fresh:
            return


def _run(ground: Ground, marks: Path, nth: int, words: tuple[str, ...]) -> Run:
    names = ground.names
    faults = [Fault(name, 3 + number, "forward") for number, name in enumerate(names)]
    folder = ground.fresh(faults)
    program = folder / "bundle" / "train.py"
    text = program.read_text()
    if IMPORTS not in text:
        raise RuntimeError(f"{program} does not import Path: nothing can be made to fail")
    program.write_text(text.replace(IMPORTS, f"import failing\n{IMPORTS}", 1))
    shutil.copy(Path(__file__).with_name("failing.py"), folder / "bundle" / "failing.py")
    more = ("--restarts", "1000", "--snapshot-every", "2", "--save", "../out", *words)
    prefix = ("env", f"BIGBRAIN_FAILING={marks}", f"BIGBRAIN_FAILING_NTH={nth}")
    return run_job(folder, (*prefix, *launch_words(STEPS, *more, hang_s=HANG_S)), DEADLINE_S)


def _newest(commits: Path) -> int:
    found = CheckpointStore(commits).records() if commits.is_dir() else []
    return max((record.step for record in found), default=-1)


def _is_kept(run: Run, commits: Path) -> bool:
    """Whether the last commit is there, or else an older one, and it was said that it is not."""
    return _newest(commits) == STEPS or (_newest(commits) >= 0 and bool(run.of("at_risk")))


def _judged(ground: Ground, run: Run, commits: Path, fresh: list[str]) -> Verdict:
    """Judge a run in which these calls have failed."""
    reference = ground.reference()
    bits = same_bits(run, reference) if run.code == 0 else None
    problems = losses_differ(run, reference)
    checks = {
        f"exit code {run.code}: {last_line(run.said)}": run.code in (0, *ENDS),
        "it ends without an error": run.code == 0 or ERROR.search(run.said) is not None,
        "other bits at the end": bits is not False,
        "no commit at the end, and no warning": run.code != 0 or _is_kept(run, commits),
        f"processes {run.orphans} were left": not run.orphans,
    }
    problems += [f"{text} (of {fresh})" for text, holds in checks.items() if not holds]
    status = BROKEN if problems else KEPT
    return Verdict(status, problems[0] if problems else "", same_bits=bits, problems=(*problems,))
