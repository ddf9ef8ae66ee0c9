"""Graphs of a forward under torch.autocast: it may be cut anywhere where that is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend import Captured, capture


class Net(nn.Module):
    """Two layers under autocast; what comes after them is given."""

    def __init__(self, rest: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(torch.tanh(self.a(x)))
        return self.rest(self.head, h)


def captured(rest: Callable[[nn.Linear, Tensor], Tensor]) -> Captured:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 2, 0])}
    return capture(Net(rest), batch, lambda output, given: F.cross_entropy(output, given["y"]))


def single(head: nn.Linear, h: Tensor) -> Tensor:
    return F.linear(h.float(), head.weight, head.bias)


def in_bfloat16(head: nn.Linear, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(h, head.weight, head.bias).float()


def apart(_: nn.Linear, h: Tensor) -> Tensor:
    return h.float()[:, :3].log_softmax(1)


@pytest.mark.gate("in_bfloat16")
@pytest.mark.parametrize("rest", [in_bfloat16, apart])
def test_a_region_that_may_be_everywhere_is_the_graphs(
    rest: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    graph = captured(rest).graph
    assert graph.autocast == "bfloat16"
    assert [op.target for op in graph.ops if op.body is not None] == []
    assert graph.static_batch is None


def test_a_region_stands_where_what_follows_computes_in_float32() -> None:
    """Everywhere, autocast would round the head's product, too."""
    graph = captured(single).graph
    assert graph.autocast is None
    assert [op.target for op in graph.ops if op.body is not None] == ["region.autocast"]


def test_a_region_stands_where_what_follows_is_not_traced() -> None:
    """Opaque code may cast inside, and its result would have the type that it had."""

    def rest(head: nn.Linear, h: Tensor) -> Tensor:
        found: Tensor = head(h.float())
        return found

    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 2, 0])}
    net = Net(rest)
    net.head = Rounding(8, 3)
    found = capture(net, batch, lambda o, given: F.cross_entropy(o, given["y"]), leaves=["head"])
    assert found.graph.autocast is None


class Rounding(nn.Linear):
    """Rounds where it is cast, and says nothing of it by its type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def test_a_product_in_float32_is_apart_from_an_autocast_of_the_whole() -> None:
    """Off within, autocast is a region itself; what is on within that is one, too."""

    def rest(head: nn.Linear, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = F.linear(h.float(), head.weight)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return y + F.linear(h, head.weight, head.bias).float()

    graph = captured(rest).graph
    assert graph.autocast == "bfloat16"
    (island,) = [op for op in graph.ops if op.body is not None]
    assert dict(island.kwargs)["enabled"] is False
    assert island.body is not None
    assert "region.autocast" in [op.target for op in island.body.ops]
