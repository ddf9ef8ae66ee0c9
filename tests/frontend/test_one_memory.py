"""Gradients that plain PyTorch leaves in one memory, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.one_memory import in_one_memory


class Stacked(nn.Module):
    """Computes with a sum of weights that `way` puts together."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sum":
            return x @ torch.stack(list(self.weights)).sum(0)
        if self.way == "einsum":
            return torch.einsum("bi,kij->bj", x, torch.stack(list(self.weights)))
        if self.way == "mean":
            return x @ torch.stack(list(self.weights)).mean(0)
        if self.way == "remedy":
            return x @ torch.stack([w * 1 for w in self.weights]).sum(0)
        return (x @ torch.stack(list(self.weights))).relu().sum(0)


def _loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).pow(2).mean()


@pytest.mark.gate("mean", "sum")
@pytest.mark.parametrize("way", ["sum", "einsum", "mean", "remedy", "batched"])
def test_gradients_of_one_memory_are_told_of(way: str) -> None:
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    said = [w for w in capture(Stacked(way), batch, _loss).warnings if "one memory" in w]
    assert bool(said) == (way in ("sum", "einsum"))
    for text in said:
        assert "test_one_memory.py:" in text
        assert "weights.0, weights.1, weights.2" in text


def test_parts_of_one_storage_are_no_one_memory() -> None:
    home = torch.zeros(6)
    apart: dict[str, Tensor | None] = {"a": home[:3], "b": home[3:], "c": None}
    assert in_one_memory(apart) == ()
    assert in_one_memory({**apart, "d": home[1:4]}) == ("a", "b", "d")
