"""Rows of `tools.studies.fidelity`: what was forecast and measured of each cell, as lines of JSON.

A time counts in units of a reference matrix product that was timed in the same minute, so that a
machine that is slower today is no error of the forecast.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.bench.json_lines import append_line, read_lines
from tools.studies.fidelity.cells import Cell


@dataclass(frozen=True)
class Row:
    """What was forecast and measured of one cell; times in seconds, bytes by device.

    Attributes:
        step_s: of each run, its steps but the first.
        reference_s: of the matrix product, timed beside each run: the median.
        forecast_s: by source: "survey", "share", "analytical" (see `tools.studies.fidelity`).
        forecast_reference_s: by source, of the product when what the forecast rests on was timed.
        forecast_now_s: `forecast_s` with processors as fast as beside the runs (`fidelity_drift`).
        covered: share of the ops' time that the profile has.
        tracked_bytes: peak of live tensors; empty where it was not measured.
        reserved_bytes: what a plan is refused by.
        busy: share of all processors' time that was in use during each run; the emulated devices
            take half of it at most, so that much more means: others disturbed the run.
        resident_bytes: VmHWM less a warmed baseline; measured where `tracked_bytes` is.
    """

    model: str
    cluster: str
    schedule: str
    split: str
    step_s: Sequence[Sequence[float]]
    reference_s: Sequence[float]
    forecast_s: Mapping[str, float]
    forecast_reference_s: Mapping[str, float]
    forecast_now_s: Mapping[str, float] = field(default_factory=dict)
    covered: float = 0.0
    forecast_bytes: Mapping[str, int] = field(default_factory=dict)
    tracked_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    busy: Sequence[float] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def cell(self) -> Cell:
        """What was measured."""
        return Cell(self.model, self.cluster, self.schedule, self.split)

    @property
    def runs(self) -> Sequence[float]:
        """The median step of each run, in reference products."""
        pairs = zip(self.step_s, self.reference_s, strict=True)
        return [statistics.median(steps) / reference_s for steps, reference_s in pairs]

    @property
    def measured(self) -> float:
        """The median run, in reference products."""
        return statistics.median(self.runs)

    @property
    def measured_s(self) -> float:
        """The median run in seconds."""
        return statistics.median(map(statistics.median, self.step_s))

    def forecast(self, source: str) -> float:
        """Return the forecast in reference products."""
        if source in self.forecast_now_s:
            return self.forecast_now_s[source] / statistics.median(self.reference_s)
        return self.forecast_s[source] / self.forecast_reference_s[source]

    def seconds(self, source: str) -> float:
        """Return the forecast in seconds of the machine as it was beside the runs."""
        return self.forecast(source) * statistics.median(self.reference_s)

    @property
    def slower(self) -> dict[str, float]:
        """How much longer the product took beside the runs than when each forecast was grounded."""
        now_s = statistics.median(self.reference_s)
        return {source: now_s / then_s for source, then_s in self.forecast_reference_s.items()}

    def error(self, source: str, factor: float = 1.0) -> float:
        """Return forecast times factor over measured, less one."""
        return factor * self.forecast(source) / self.measured - 1

    @property
    def memory_errors(self) -> Sequence[float]:
        """Forecast peak over tracked peak, less one, of each device."""
        return [self.forecast_bytes[d] / found - 1 for d, found in self.tracked_bytes.items()]


def read_rows(path: Path) -> Sequence[Row]:
    """Read the rows of a file, the last one of each cell: see `read_lines`."""
    rows = read_lines(path, "tools.studies.fidelity", lambda content: Row(**content))
    return list({row.cell: row for row in rows}.values())


def append_row(path: Path, row: Row) -> None:
    """Add a row: see `append_line`."""
    append_line(path, asdict(row))
