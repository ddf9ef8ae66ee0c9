"""What lines ask of the number of rows: a trace keeps one answer, so it holds for one number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import Captured, capture

ROWS = 8
Make = Callable[[Tensor], Tensor]


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


def test_what_the_model_itself_refuses_is_no_answer() -> None:
    def even(rows: int) -> int:
        if rows % 2:
            raise ValueError("pairs")
        return 2

    assert of(even).graph.static_batch is None


SCALES = {"4": 3.0, "2": 5.0}


class Told(nn.Module):
    """A table by the text of how many rows there are."""

    def __init__(self, told: Callable[[Tensor], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.told = nn.Linear(3, 4), told

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.told(x)).square().mean()


@pytest.mark.gate("str")
@pytest.mark.parametrize(
    "told",
    [
        lambda x: SCALES.get(f"{x.shape[0]}", 1.0),
        lambda x: 3.0 if repr(x.shape) == "torch.Size([4, 3])" else 1.0,
        lambda x: 3.0 if str(x.shape[0] / 2) == "2.0" else 1.0,
        lambda x: SCALES.get(str(x.size(0)), 1.0),
    ],
    ids=["an f-string", "a shape's text", "of a half", "str"],
)
def test_text_of_the_number_of_rows_is_no_symbol(told: Callable[[Tensor], float]) -> None:
    torch.manual_seed(1)
    found = capture(Told(told), torch.randn(ROWS, 3), None, micro_batch=4)
    assert found.graph.static_batch == 4
    assert "trace holds for micro-batches of 4 rows only" in found.warnings[0]


def test_text_that_is_only_shown_leaves_the_rows_free(capsys: pytest.CaptureFixture[str]) -> None:
    def told(x: Tensor) -> float:
        print(x.shape)
        return 1.0

    torch.manual_seed(1)
    found = capture(Told(told), torch.randn(ROWS, 3), None, micro_batch=4)
    assert found.graph.static_batch is None
    assert "torch.Size" in capsys.readouterr().out
