"""Micro-batches without rows of their own: they run again another's, and nothing of that counts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .feature import Feature


class UnevenRows(Feature):
    """Drop what the forward of a micro-batch without rows writes: running statistics, counters."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a Device, which knows this file
        """Prepare for a device."""
        self.device = device

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Let a stage write into copies where its micro-batch counts nothing."""
        if phase != "forward" or self._counts(micro) or self._is_summed(stage):
            return nullcontext()
        from .recompute import Twice  # only bundles that run stages twice have it

        return Twice(self.device.modules[stage]).aside()

    def _counts(self, micro: int) -> bool:
        sizes = self.device.stream.sizes
        return not sizes or sizes[micro] > 0

    def _is_summed(self, stage: int) -> bool:
        """Whether replicas write the stage's statistics together, which leave such parts out."""
        statistics = self.device.statistics
        return statistics is not None and statistics.has(stage)
