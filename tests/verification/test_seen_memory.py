"""What computes by how values lie in memory gets them, in a group, as they lie in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.verification.sharding import agree


def _strided(y: Tensor) -> Tensor:
    """Windows over channels that lie one beside the other: overlapping, along memory."""
    return torch.as_strided(y, (5, 60, 4), (y.stride(0), 3, 1))


class Windows(torch.autograd.Function):
    """Code that no trace looks into, by strides."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.order = y.stride()
        return (
            y * torch.arange(y.numel(), dtype=y.dtype).as_strided(y.shape, y.stride()) / y.numel()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (
            grad
            * torch.arange(grad.numel(), dtype=grad.dtype).as_strided(grad.shape, ctx.order)
            / grad.numel()
        )


def _in_code(y: Tensor) -> Tensor:
    out: Tensor = Windows.apply(y)  # type: ignore[no-untyped-call]
    return out


def _in_region(y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return nn.functional.dropout(y, 0.5)


def _strided_in_region(y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return _strided(y)


class Summed(nn.Module):
    """A sum over members that lies channels last, and what sees that."""

    def __init__(self, see: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 3, 1)
        self.see = see

    def forward(self, x: Tensor) -> Tensor:
        return self.see(self.down(self.up(x.permute(0, 3, 1, 2)).relu())).pow(2).sum()


def _captured(see: Callable[[Tensor], Tensor]) -> Captured:
    return capture(Summed(see), {"x": torch.randn(5, 7, 9, 4)})


@pytest.mark.gate("_in_code")
@pytest.mark.parametrize("see", [_strided, _in_code, _in_region, _strided_in_region])
def test_a_divided_tensor_has_the_memory_layout_of_one_process(
    see: Callable[[Tensor], Tensor],
) -> None:
    """A sum lay row by row: other windows, or other numbers, were taken in silence."""
    found = _captured(see)
    there = chosen_axes(priced_axes(found.graph, axes(found.graph)), 2)
    assert any(place.name == "up.weight" for axis in there for place in axis.params)
    for exact, limit in ((False, 1e-5), (True, 1e-12)):
        result = agree(found, there, (2, 1), exact=exact)
        assert max(result.gradients, result.loss) <= limit


def test_a_part_of_a_memory_is_not_strided_over() -> None:
    """A copy of it has other neighbours, or none: refused, and the remedy helps."""
    found = _captured(lambda y: torch.as_strided(y[:, :2], (5, 60, 2), (y.stride(0), 3, 1)))
    there = chosen_axes(priced_axes(found.graph, axes(found.graph)), 2)
    with pytest.raises(InputError, match="strides over memory") as refused:
        agree(found, there, (2, 1))
    assert "test_seen_memory.py" in (refused.value.at or "")
    cloned = _captured(lambda y: torch.as_strided(y[:, :2].clone(), (5, 60, 2), (126, 2, 1)))
    there = chosen_axes(priced_axes(cloned.graph, axes(cloned.graph)), 2)
    assert agree(cloned, there, (2, 1), exact=True).gradients <= 1e-12
