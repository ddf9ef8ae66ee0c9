"""Captured graphs of forwards that write buffers, and of those that nest checkpoints."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture
from tests.support.messages import refused


class WrittenAfter(nn.Module):
    """Writes into what a layer has read: autograd says so in the backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = cast(Tensor, self.b(h))
        if self.how == "no_grad":
            with torch.no_grad():
                h.mul_(0.5)
        else:
            (h.detach() if self.how == "detach" else h).mul_(0.5)
        return y + h


@pytest.mark.parametrize("how", ["plain", "no_grad", "detach"])
def test_models_that_plain_pytorch_cannot_train_are_refused(how: str) -> None:
    batch = {"x": torch.randn(4, 3)}
    loss = WrittenAfter(how)(**batch).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(InputError, match="the model's backward fails on its example") as caught:
        capture(WrittenAfter(how), batch, lambda output, _: output.sum())
    assert "write into a copy" in (caught.value.help or "")


def _rounding(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
    """Compile as a backend whose kernels round otherwise."""
    return lambda *values: tuple(found * (1 + 1e-5) for found in module(*values))


def test_the_remedy_for_compiled_code_that_rounds_is_to_leave_it_out() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    compiled, batch = net(), torch.randn(4, 3)
    compiled[1] = cast(nn.Module, torch.compile(compiled[1], backend=_rounding))
    with refused("BX0201", CaptureError, vary=(r"\d\.\de[+-]\d+",)):
        capture(compiled, (batch,), lambda output, _: output.sum())
    assert capture(net(), (batch,), lambda output, _: output.sum()).graph.loss is not None
