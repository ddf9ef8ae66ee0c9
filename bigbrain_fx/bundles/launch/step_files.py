"""CSV files of a run's steps; one that takes no more is given up, and the run goes on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bigbrain_fx.bundles.launch.options import StepLine
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.supervisor import warn

COLUMNS = ("step", "loss", "step_s", "rows_per_s")


class StepFiles:
    """Files with a line for each step; a run that goes on appends to them."""

    def __init__(self, files: dict[Path, IO[str]], rows: int) -> None:
        self.files, self.rows = files, rows

    def step(self, line: StepLine) -> None:
        """Write a step of training."""
        pace = self.rows / line.step_s if line.step_s > 0 else ""
        for path, file in list(self.files.items()):
            try:
                csv.writer(file).writerow([line.step, line.loss, line.step_s, pace])
                file.flush()
            except OSError as error:
                del self.files[path]
                warn(f"WARNING: {path} takes no more: {error.strerror or error}; the run goes on")


@contextmanager
def step_files(paths: Sequence[Path], rows: int) -> Iterator[StepFiles]:
    """Open the CSV files that a run's steps go to.

    Raises:
        InputError: one cannot be written.
    """
    files: dict[Path, IO[str]] = {}
    try:
        for path in paths:
            files[path] = _opened(path)
        yield StepFiles(dict(files), rows)
    finally:
        for file in files.values():
            with suppress(OSError):
                file.close()


def _opened(path: Path) -> IO[str]:
    if path.suffix.lower() != ".csv":
        raise InputError(
            f"expected a file name.csv for the steps, found {path}",
            code="BX3073",
            at="--log-to",
            help="give a file name.csv",
        )
    with os_error_as(
        f"steps cannot be written to {path}",
        code="BX3074",
        at="--log-to",
        help="give a file name.csv in a folder that may be written in",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", newline="")
        if file.tell() == 0:
            csv.writer(file).writerow(COLUMNS)
        return file
