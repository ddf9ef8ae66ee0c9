"""A script of the user's after each commit of a run: validation aside, while the training goes on.

    python SCRIPT model.safetensors 40      the weights of step 40, under the model's own names

The last line that it prints is what it found: a number, or a JSON object of numbers. One runs at a
time; commits that are written meanwhile are passed over, but for the last. Its failure is reported
and ends nothing. This module knows commits and a script; it knows no models.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.bundles.child_programs import run_group
from bigbrain_fx.bundles.going_on import export_commit
from bigbrain_fx.errors import InputError
from bigbrain_fx.runtime import CheckpointStore, CommitError
from bigbrain_fx.weights import Scratch

LIMIT_S = 3600.0  # of one validation


@dataclass(frozen=True)
class Validation:
    """Result of a script at a step: numbers by name, or the reason for their absence."""

    step: int
    values: Mapping[str, float]
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"WARNING: no validation at step {self.step}: {self.failure}"
        found = "   ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        return f"validation at step {self.step}: {found}"


class Validator:
    """Looks for a new commit whenever a step is done, and runs the script on it."""

    def __init__(
        self, bundle: Path, script: Path, commits: Path, tell: Callable[[Validation], None]
    ) -> None:
        self.bundle, self.script, self.commits = bundle, script, commits
        self.tell = tell
        self.seen = self._newest() or 0  # a run that goes on validated that one before
        self.words: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True, name="validation")
        self.thread.start()

    def hear_step(self, _step: object) -> None:
        """A step is done: there may be a commit."""
        if self.words.empty():
            self.words.put(True)

    def close(self) -> None:
        """Validate the last commit, and wait for that."""
        self.words.put(False)
        self.thread.join(LIMIT_S)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self.words.get()
            newest = self._newest()
            if newest is not None and newest > self.seen:
                self.seen = newest
                self.tell(self._validated(newest))

    def _newest(self) -> int | None:
        with suppress(OSError, CommitError):
            records = CheckpointStore(self.commits).records()
            return records[0].step if records else None
        return None

    def _validated(self, step: int) -> Validation:
        with Scratch("validation") as folder:
            file = Path(folder) / "model.safetensors"
            try:
                _, step = export_commit(self.bundle, file, self.commits)
                words = (sys.executable, str(self.script), str(file), str(step))
                done = run_group(words, LIMIT_S)
            except (InputError, OSError, subprocess.TimeoutExpired) as error:
                return Validation(step, {}, str(error).splitlines()[0])
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return Validation(step, {}, f"{self.script} ended with code {done.returncode}: {last}")
        return _read(step, done.stdout)


def _read(step: int, text: str) -> Validation:
    """Read the last line: 2.5, or {"loss": 2.5, "accuracy": 0.7}."""
    last = (text.strip().splitlines() or [""])[-1]
    try:
        found = json.loads(last)
        values = found if isinstance(found, dict) else {"loss": found}
        return Validation(step, {str(name): float(value) for name, value in values.items()})
    except (ValueError, TypeError, RecursionError):
        what = "expected a number or a JSON object of numbers in its last line"
        return Validation(step, {}, f"{what}, found {last[:80]!r}")


@contextmanager
def validations(
    bundle: Path, script: Path | None, commits: Path | None, tell: Callable[[Validation], None]
) -> Iterator[Callable[[object], None]]:
    """Give a function that receives steps of a run; without a script it does nothing.

    Raises:
        InputError: there is no such script, or the run has no commits.
    """
    if script is None:
        yield lambda _: None
        return
    if commits is None or not script.is_file():
        none = "a validation is of a checkpoint, and this run writes none"
        what = none if commits is None else f"there is no file {script}"
        raise InputError(
            what, code="BX3147", at="--validate", help="--validate FILE.py --checkpoint-dir FOLDER"
        )
    validator = Validator(bundle, script.resolve(), commits, tell)
    try:
        yield validator.hear_step
    finally:
        validator.close()
