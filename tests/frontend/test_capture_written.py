"""Captured graphs of forwards that write buffers, and of those that nest checkpoints."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.lines.advice import COMPILED


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


def test_compiled_code_is_captured_as_it_was_written() -> None:
    """No backend is asked: it would compile for each size, and round otherwise than a trace."""
    asked: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        asked.append(module)
        return lambda *values: tuple(found * (1 + 1e-5) for found in module(*values))

    net, batch = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(4, 3)
    plain = capture(net, (batch,), lambda output, _: output.sum())
    net[1] = cast(nn.Module, torch.compile(net[1], backend=backend))
    found = capture(net, (batch,), lambda output, _: output.sum())
    assert not asked
    assert [op.target for op in found.graph.ops] == [op.target for op in plain.graph.ops]
    assert found.warnings == (COMPILED,)
    with torch.no_grad():
        net(batch)
    assert asked  # the caller's own calls are compiled, as before
