"""Opaque lines and modules that are given a number of rows: the trace stays free of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same


class Masked(nn.Module):
    """Its lines get `rows` from lines before them, as XLM's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        h = self.a(x)
        count = int((h > 0).sum()) % width
        mask = (torch.arange(width) < count).expand(rows, width)
        return self.b(h * mask)


class Part(nn.Module):
    def forward(self, x: Tensor, rows: int) -> Tensor:
        return x[: int((x > 9).sum()) + rows] * 2


class Told(nn.Module):
    """Its part is told how many rows there are, and one fewer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.part = nn.Linear(8, 8), Part()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(self.a(x), x.shape[0])
        return found


@pytest.mark.parametrize("kind", [Masked, Told])
def test_the_trace_holds_for_any_number_of_rows(kind: type[nn.Module]) -> None:
    model = kind()
    found = capture(model, {"x": torch.rand(6, 8)}, lambda output, batch: output.mean())
    assert found.graph.static_batch is None
    (op,) = (op for op in found.graph.ops if op.target.startswith("leaf."))
    assert any(ref.startswith("sym_size") for ref in op.refs)

    def eager(x: Tensor) -> Tensor:
        return model(x).mean()

    assert_same(model, found, eager)
    assert_same(model, found, eager, 3)
