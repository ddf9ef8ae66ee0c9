"""What a run's steps are written to besides the terminal: CSV files, and TensorBoard's folders.

A file that takes no more is given up, and the run goes on.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from bigbrain_fx.bundles.launch.options import StepLine
from bigbrain_fx.bundles.launch.tensorboard import EventFile
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.supervisor import warn

COLUMNS = ("step", "loss", "step_s", "rows_per_s")


class StepFile(Protocol):
    """Where numbers of steps go, by name."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write those of one step."""

    def close(self) -> None:
        """Write what is left."""


class CsvFile:
    """A CSV file with a line for each step; a run that goes on appends to it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8", newline="")
        self.lines = csv.writer(self.file)
        if self.file.tell() == 0:
            self.lines.writerow(COLUMNS)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line; what has no column is left out."""
        self.lines.writerow([step, *(values.get(name, "") for name in COLUMNS[1:])])
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class StepFiles:
    """Several of them; each is given up once it fails."""

    def __init__(self, files: Mapping[Path, StepFile], rows: int) -> None:
        self.files = dict(files)
        self.rows = rows

    def step(self, line: StepLine) -> None:
        """Write a step of training."""
        pace = self.rows / line.step_s if line.step_s > 0 else math.nan
        values = {"loss": line.loss, "step_s": line.step_s, "rows_per_s": pace}
        self.write(line.step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step, by name."""
        for path, file in list(self.files.items()):
            try:
                file.write(step, values)
            except OSError as error:
                del self.files[path]
                warn(f"WARNING: {path} takes no more: {error.strerror or error}; the run goes on")


@contextmanager
def step_files(paths: Sequence[Path], rows: int) -> Iterator[StepFiles]:
    """Open the files that a run's steps go to: name.csv, or a folder for TensorBoard.

    Raises:
        InputError: one cannot be written.
    """
    files: dict[Path, StepFile] = {}
    try:
        for path in paths:
            files[path] = _opened(path)
        yield StepFiles(files, rows)
    finally:
        for file in files.values():
            with suppress(OSError):
                file.close()


def _opened(path: Path) -> StepFile:
    is_csv = path.suffix.lower() == ".csv" and not path.is_dir()
    if path.suffix and not is_csv and not path.is_dir():
        raise InputError(
            f"{path} would be a folder for TensorBoard, and its name looks like a file's",
            code="BX3073",
            at="--log-to",
            help="give a file name.csv, or a folder that is there or has no suffix",
        )
    with os_error_as(
        f"steps cannot be written to {path}",
        code="BX3074",
        at="--log-to",
        help="give a file name.csv, or a folder for TensorBoard",
    ):
        return CsvFile(path) if is_csv else EventFile(path)
