"""A Function that gives no gradient back: said, since a stage before it cannot see that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def stop(x: Tensor) -> Any:
    return Stop.apply(x)  # type: ignore[no-untyped-call]


class Model(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.where = nn.Linear(3, 4), nn.Linear(4, 4), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "weight":
            return (self.second(x @ stop(self.first.weight).T) + self.first.bias).square().mean()
        h = self.first(x)
        kept = h.sum(1, keepdim=True) if self.where == "beside" else 0
        h = h.detach() if self.where == "detached" else h
        return self.second(stop(h) + kept).square().mean()


def of(where: str) -> object:
    torch.manual_seed(1)
    return capture(Model(where), torch.randn(8, 3), None)


def test_what_all_gradients_of_a_weight_end_in_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"BX0112: .*Stop gives no gradient back, so first"):
        of("layer")


@pytest.mark.parametrize("where", ["detached", "beside", "weight"])
def test_a_weight_that_is_given_itself_detached_or_read_elsewhere_is_not(where: str) -> None:
    of(where)
