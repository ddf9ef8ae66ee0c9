"""A loss that is a module with buffers is traced; what is written beside the model is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend import capture


class Criterion(nn.Module):
    """Weighs classes, and may follow the outputs with a centre of its own."""

    weight: Tensor

    def __init__(self, follows: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))
        self.follows = follows

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.follows:
            with torch.no_grad():
                self.weight.mul_(0.9).add_(output.mean(0), alpha=0.1)
        return F.cross_entropy(output, batch["label"], weight=self.weight)


def example() -> dict[str, Tensor]:
    return {"input": torch.randn(6, 4), "label": torch.arange(6) % 3}


def test_a_loss_that_writes_its_buffer_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="gives other numbers than the first") as caught:
        capture(nn.Sequential(nn.Linear(4, 3)), example(), Criterion(follows=True))
    assert (caught.value.at or "").startswith("test_loss_module.py:")
    assert "a loss that is a module with buffers is held by the model" in (caught.value.help or "")


class Counting(nn.Module):
    """Adds into a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.usage = nn.Linear(4, 3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.usage.add_(out.detach().sum(0))
        return out.square().mean()


@pytest.mark.parametrize(
    ("model", "said", "remedy"),
    [
        (Counting(), r"no buffer of the model \(usage, 3\)", "register_buffer"),
    ],
)
def test_tensors_beside_the_model(model: nn.Module, said: str, remedy: str) -> None:
    with pytest.raises(BigBrainError, match=said) as caught:
        capture(model, (torch.randn(6, 4),))
    assert (caught.value.at or "").startswith("test_loss_module.py:")
    assert remedy in (caught.value.help or "")


class Sparse(nn.Module):
    adj: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adj", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adj, x.t()).mean()


def test_a_sparse_buffer_names_a_way_for_any_layout() -> None:
    with pytest.raises(InputError, match="adj is a sparse tensor") as caught:
        capture(Sparse(), (torch.randn(6, 4),))
    assert (caught.value.at or "").startswith("test_loss_module.py:")
    assert "to_sparse_coo().coalesce()" in (caught.value.help or "")
