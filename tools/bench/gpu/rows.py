"""Rows of `tools.bench.gpu`: forecast and measurement of one model on one card, as JSON lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tools.bench.json_lines import append_line, read_lines

Key: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True)
class Family:
    """The ops of one family in one step; seconds are of all micro-batches.

    Attributes:
        ops: of a micro-batch.
        forward_s, backward_s: from the profile database.
        analytical_forward_s, analytical_backward_s: by `analytical`, at doctor's rates.
        roofline_forward_s, roofline_backward_s: what flops or bytes take at doctor's rates.
    """

    name: str
    ops: int
    forward_s: float
    backward_s: float
    analytical_forward_s: float
    analytical_backward_s: float
    roofline_forward_s: float
    roofline_backward_s: float

    @property
    def measured_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def analytical_s(self) -> float:
        """Forward and backward."""
        return self.analytical_forward_s + self.analytical_backward_s


@dataclass(frozen=True)
class Rates:
    """Rates of a device, measured or by its datasheet; None: unknown."""

    flops_per_s: float
    half_flops_per_s: float | None
    memory_bytes_per_s: float
    memory_bytes: int
    launch_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One model on one card.

    Attributes:
        card: the device's own name. kind: "cuda" or "cpu".
        step_s: of each step after the warm-up.
        forecast_s: by "analytical" (doctor's rates), "preset" (the datasheet's, where one matches)
            and "measured".
        covered: share of the ops' forecast time that was profiled.
        measured_bytes: `torch.cuda.max_memory_allocated`; on a CPU the peak of live tensors.
        blas_bytes: of one cuBLAS workspace, as torch says it; 0 on a CPU, or where it does not.
        doctor, datasheet: rates; the datasheet's name is `preset`, "" where none matches.
        profiled_launch_s: what an op's start took where the ops were profiled; `doctor` has the
            same of the same device, a few minutes apart.
        products_use_tf32: whether torch may take TF32 for products in float32; None on a CPU.
    """

    model: str
    size: str
    card: str
    kind: str
    torch: str
    date: str
    rows: int
    micro_batches: int
    step_s: Sequence[float]
    forecast_s: Mapping[str, float]
    covered: float
    forecast_bytes: int
    measured_bytes: int
    doctor: Rates
    preset: str = ""
    datasheet: Rates | None = None
    ops: Sequence[Family] = field(default_factory=list)
    blas_bytes: int = 0
    profiled_launch_s: float | None = None
    products_use_tf32: bool | None = None

    @property
    def key(self) -> Key:
        """Key of a measurement."""
        return self.model, self.size, self.card, self.torch

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    def error(self, estimator: str) -> float:
        """Return an estimator's forecast over the measured step, less one."""
        return self.forecast_s[estimator] / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """The forecast peak over the measured one, less one."""
        return self.forecast_bytes / self.measured_bytes - 1


def read_rows(path: Path) -> Sequence[Row]:
    """Read the rows of a file, the last of each key: see `read_lines`."""
    return list({row.key: row for row in read_lines(path, "tools.bench.gpu", _row)}.values())


def _row(content: dict[str, Any]) -> Row:
    sheet = content.pop("datasheet")
    ops = [Family(**entry) for entry in content.pop("ops")]
    doctor = Rates(**content.pop("doctor"))
    return Row(**content, doctor=doctor, datasheet=sheet and Rates(**sheet), ops=ops)


def append_row(path: Path, row: Row) -> None:
    """Add a row: see `append_line`."""
    append_line(path, asdict(row))
