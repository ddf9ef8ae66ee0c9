"""Run today's slice of all tests for at most 20 minutes: `python -m tests.support.nightly`.

Every day has its slice (`tests.support.slices`). A test that fails runs again, alone, and fails
the run only if it fails twice. A test that the time does not reach is counted and waits for the
next turn of its slice, which begins with other files.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.support import recording
from tests.support.slices import Slice, of_day

SLICES = 8
WALL_S = 20 * 60.0
FIRST_S = 0.8  # share of the time in which tests start; the rest is for those that fail
GRACE_S = 30.0  # for a pytest that was interrupted
PYTEST = (sys.executable, "-m", "pytest", "-q", "--benchmark-disable")
ALL = ("--hypothesis-profile=nightly", "-p", "no:cacheprovider")
SPREAD = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
BROKEN = 3  # the exit code of a run that pytest itself could not do
FINE = (0, 1, None)  # all passed, some failed, the time has ended it


@dataclass(frozen=True)
class Clock:
    """When a run began and how long it may take, in seconds of `time.monotonic`."""

    start: float
    wall_s: float = WALL_S

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.start + self.wall_s - time.monotonic()


def run(words: Sequence[str], clock: Clock) -> int | None:
    """Run pytest until the clock's end; return its exit code, or None where that ended it."""
    process = subprocess.Popen([*PYTEST, *ALL, *words], start_new_session=True)
    try:
        return process.wait(max(0.0, clock.left_s()))
    except subprocess.TimeoutExpired:
        _end(process)
        return None
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, as Ctrl-C does, so that it ends what its tests have started; then kill it."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def first_run(part: Slice, clock: Clock, folder: Path) -> tuple[int | None, recording.Tests]:
    """Run a slice; return pytest's exit code and what became of each test."""
    file = folder / "tests.json"
    late = f"--until={time.time() + clock.left_s() * FIRST_S}"
    words = (*SPREAD, f"--slice={part}", f"--turn={part.turn}", late, f"--record={file}")
    code = run(words, clock)
    return code, recording.read(file)


def failed_twice(tests: Sequence[str], clock: Clock) -> tuple[list[str], list[str]]:
    """Run each failed test again by itself; return those that fail again and those not reached."""
    again: list[str] = []
    for place, test in enumerate(tests):
        code = run(("-n", "0", test), clock) if clock.left_s() > 0 else None
        if code is None:
            return again, list(tests[place:])
        if code != 0:
            again.append(test)
    return again, []


def summary(tests: recording.Tests, again: Sequence[str], unknown: Sequence[str]) -> str:
    """Say what a run did, in a line each."""
    failed = recording.with_outcome(tests, "failed")
    late = recording.with_outcome(tests, "late")
    once = [test for test in failed if test not in (*again, *unknown)]
    passed = len(recording.with_outcome(tests, "passed"))
    lines = [f"passed: {passed}, failed twice: {len(again)}, not reached in the time: {len(late)}"]
    lines += [f"failed once, passed alone: {test}" for test in once]
    lines += [f"failed once, no time to run it again: {test}" for test in unknown]
    lines += [f"failed twice: {test}" for test in again]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the slice of today; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day", type=int, default=datetime.now(UTC).date().toordinal())
    parser.add_argument("--wall-s", type=float, default=WALL_S)
    options = parser.parse_args(argv)
    part, clock = of_day(options.day, SLICES), Clock(time.monotonic(), options.wall_s)
    print(f"nightly tests, slice {part}, at most {clock.wall_s / 60:.0f} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        code, tests = first_run(part, clock, Path(folder))
    if not tests or code not in FINE:
        print(f"pytest did not run the slice; its exit code is {code}", flush=True)
        return BROKEN
    again, unknown = failed_twice(recording.with_outcome(tests, "failed"), clock)
    print(summary(tests, again, unknown), flush=True)
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main())
