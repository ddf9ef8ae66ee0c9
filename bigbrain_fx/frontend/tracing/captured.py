"""A captured model: its graph, and the real things that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.translation.batch import Batch


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and the tensors and functions behind its names.

    Attributes:
        graph: sizes are arithmetic over "B" unless `graph.static_batch` is set.
        tensors: parameters, buffers and constants by name; the user's own, not copies.
        functions: the user's own Python behind `opaque.`, `leaf.` and `user.` targets.
        warnings: remarks for the user, one sentence each.
        batch: the example batch, taken apart.
        written: entries of the batch that forward or loss write into.
        device_lines: the user's lines that query the device.
    """

    graph: Graph
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, object]
    warnings: tuple[str, ...]
    batch: Batch
    written: tuple[str, ...] = ()
    device_lines: tuple[str, ...] = ()

    def inputs(self, rows: int | None = None) -> dict[str, Tensor]:
        """Return the example batch by input name, with `rows` rows (its own when left out)."""
        return self.batch.sized(self.batch.rows if rows is None else rows)
