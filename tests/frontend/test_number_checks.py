"""Lines that read a number, to compare it and raise, are opaque: they raise as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same, run


class Checked(nn.Module):
    """Looks at lengths as XLM does, and at a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.linear(x)
        assert lengths.max().item() <= h.shape[1]
        if h.abs().max().item() > 100.1:
            raise ValueError("too large")
        return (h * (torch.arange(4) < lengths[:, None])).square().mean()


def test_lines_that_check_numbers_are_opaque() -> None:
    model = Checked()
    found = capture(model, (torch.randn(4, 4), torch.tensor([1, 2, 3, 4])))
    assert found.graph.static_batch is None
    assert_same(model, found, model)
    assert any(op.target.startswith("leaf.forward_") for op in found.graph.ops)


def test_a_check_that_fails_later_raises() -> None:
    model = Checked()
    found = capture(model, (torch.randn(4, 4), torch.tensor([1, 2, 3, 4])))
    with pytest.raises(AssertionError):
        run(found, {"x": torch.randn(4, 4), "lengths": torch.tensor([1, 2, 3, 5])})
