"""What lines ask of the number of rows: a trace keeps one answer, so it holds for one number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import Captured, capture

ROWS = 8


class Body(nn.Module):
    """Experts' places: rows beyond a capacity count nothing, and few rows never come so far."""

    def __init__(self, capacity: Callable[[int], int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        place = (h > 9).long().cumsum(0)  # nowhere, in the example
        return (h * (place < self.capacity(h.shape[0]))).square().mean()


def of(capacity: Callable[[int], int], micro_batch: int | None = None) -> Captured:
    torch.manual_seed(1)
    return capture(Body(capacity), torch.randn(ROWS, 3), None, micro_batch=micro_batch)


ASKED: dict[str, Callable[[int], int]] = {
    "a share, cut to a whole number": lambda n: int(1.25 * n / 3) + 1,
    "a branch on a remainder": lambda n: 1 if n % 8 else 2,
    "a branch on one number": lambda n: 1 if n == ROWS // 2 else 2,
    "a branch on the size": lambda n: 2 if n > 5 else 1,
}
FREE: dict[str, Callable[[int], int]] = {
    "a sum": lambda n: n // 3 + 1,
    "rounded up": lambda n: math.ceil(n / 3) + 1,
    "a branch that fewer rows take, too": lambda n: 1 if n > 0 else 2,
}


@pytest.mark.parametrize("name", ASKED)
def test_a_trace_that_keeps_an_answer_holds_for_one_number_of_rows(name: str) -> None:
    found = of(ASKED[name], ROWS // 2)
    assert found.graph.static_batch == ROWS // 2
    assert "test_asked_rows.py:" in found.warnings[0]
    assert "goes by how many rows there are" in found.warnings[0]


@pytest.mark.parametrize("name", FREE)
def test_sizes_that_a_graph_can_compute_stay_free(name: str) -> None:
    assert of(FREE[name]).graph.static_batch is None


def test_rows_that_the_model_refuses_are_no_answer() -> None:
    def even(rows: int) -> int:
        if rows % 2:
            raise ValueError("pairs")
        return 2

    assert of(even).graph.static_batch is None
