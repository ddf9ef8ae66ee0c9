"""Run an ONNX file in ONNX Runtime, and compare what it gives with tensors.

This file knows files and tensors; it knows nothing of bundles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OnnxSession:
    """A file in ONNX Runtime, on the CPU."""

    session: Any  # onnxruntime has no types

    @staticmethod
    def of(path: Path) -> OnnxSession:
        """Load a file."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        return OnnxSession(
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        )

    def run(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name; inputs that the file does not read are left out."""
        wanted = [entry.name for entry in self.session.get_inputs()]
        given = {name: arguments[name].contiguous().numpy() for name in wanted}
        names = [entry.name for entry in self.session.get_outputs()]
        found = self.session.run(names, given)
        return {n: torch.from_numpy(array) for n, array in zip(names, found, strict=True)}


def largest_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the largest difference as a share of max(1, |value|); infinite when shapes differ."""
    return max((_difference(want, found.get(name)) for name, want in expected.items()), default=0.0)


def _difference(want: Tensor, found: Tensor | None) -> float:
    if found is None or found.shape != want.shape:
        return float("inf")
    if want.numel() == 0 or torch.equal(want, found):
        return 0.0
    a, b = want.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    share = (a - b).abs() / a.abs().clamp(min=1.0)
    worst = float(torch.where(same, torch.zeros_like(share), share).max())
    return worst if worst == worst else float("inf")
