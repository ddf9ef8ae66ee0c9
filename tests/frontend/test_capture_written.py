"""Captured graphs of forwards that write buffers, and of those that nest checkpoints."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture
from tests.support.messages import refused


class Running(nn.Module):
    """Divides by a buffer that it has just written; backward reads what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("size", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.size += 0.1 * (h.abs().mean(0) - self.size)
        return (h / self.size).pow_(2).mean()


@pytest.mark.nightly
def test_what_computes_with_a_written_buffer_computes_with_a_copy() -> None:
    graph = capture(Running(), {"x": torch.randn(4, 4)}).graph
    (copy,) = (op for op in graph.ops if op.target == "aten.clone.default")
    assert copy.params == ("size",)
    (reader,) = (op for op in graph.ops if op.target == "aten.div.Tensor")
    assert copy.name in reader.refs
    assert not reader.params
    assert "aten.pow.Tensor_Scalar" in [op.target for op in graph.ops]  # not 2 ** x


class Late(torch.autograd.Function):
    """Its backward writes a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Tensor) -> Tensor:
        ctx.size = size
        return x / size

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.size.add_(1.0)
        return g, None


class WritesLate(Running):
    """Its next forward reads what backward has written."""

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", Late.apply(self.a(x), self.size)).square().mean()  # type: ignore[no-untyped-call]


def test_a_backward_that_writes_a_buffer_is_refused() -> None:
    with pytest.raises(CaptureError, match="backward writes into the buffer size") as caught:
        capture(WritesLate(), {"x": torch.randn(4, 4)})
    assert "write it in forward" in str(caught.value)


class Nested(nn.Module):
    """A checkpoint within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def _outer(self, h: Tensor) -> Tensor:
        inner = checkpoint(self.b, torch.tanh(self.a(h)), use_reentrant=False)
        return h + cast("Tensor", inner)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", checkpoint(self._outer, x, use_reentrant=False)).square().mean()


@pytest.mark.nightly
def test_a_checkpoint_within_a_checkpoint_keeps_its_gradients() -> None:
    graph = capture(Nested(), {"x": torch.randn(4, 4)}).graph  # which compares them
    assert not [op for op in graph.ops if op.target.startswith("region.")]


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
def test_what_plain_pytorch_cannot_train_is_refused(how: str) -> None:
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


def test_where_compiled_code_rounds_otherwise_the_remedy_is_to_leave_it_out() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    compiled, batch = net(), torch.randn(4, 3)
    compiled[1] = cast(nn.Module, torch.compile(compiled[1], backend=_rounding))
    with refused("BX0201", CaptureError, vary=(r"\d\.\de[+-]\d+",)):
        capture(compiled, (batch,), lambda output, _: output.sum())
    assert capture(net(), (batch,), lambda output, _: output.sum()).graph.loss is not None
