"""An optimizer that goes by what forward or `batches` leave outside it is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.outside import (
    require_fed_nothing,
    require_optimizer_apart,
)

SEEN = {"rate": 0.1}


class Net(nn.Module):
    def __init__(self, rate: float | None = None) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4), rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate is not None:
            SEEN["rate"] = self.rate
        return self.linear(x).sum()


class Seeing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            group["lr"] = SEEN["rate"]
        super().step()


def seeing(named: Any) -> torch.optim.Optimizer:
    return Seeing(named, lr=0.1)


def plain(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named)


def lowering(seed: int) -> Iterator[object]:
    while True:
        SEEN["rate"] *= 0.5
        yield (torch.zeros(2, 4),)


def steady(seed: int) -> Iterator[object]:
    while True:
        yield (torch.zeros(2, 4),)


@pytest.mark.parametrize(("rate", "batches"), [(0.2, None), (0.2, steady), (None, lowering)])
def test_an_optimizer_that_reads_what_they_write(rate: float | None, batches: Any) -> None:
    example = (torch.zeros(2, 4),)
    with pytest.raises(InputError, match="goes by what forward or batches") as caught:
        require_optimizer_apart(Net(rate), example, None, None, seeing, batches)
    assert "lr_scale(step)" in (caught.value.help or "")
    assert SEEN == {"rate": 0.1}


@pytest.mark.parametrize(
    ("make", "rate", "batches"), [(seeing, None, steady), (plain, 0.2, lowering)]
)
def test_others_are_let_be(make: Any, rate: float | None, batches: Any) -> None:
    require_optimizer_apart(Net(rate), (torch.zeros(2, 4),), None, None, make, batches)
    assert SEEN == {"rate": 0.1}


class Warming(torch.optim.SGD):
    """Warms up by the wall clock."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.start_s = time.monotonic()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            group["lr"] = 0.01 if time.monotonic() - self.start_s < 60 else 0.1
        super().step()


def test_an_optimizer_that_goes_by_the_clock() -> None:
    def warming(named: Any) -> torch.optim.Optimizer:
        return Warming(named, lr=0.1)

    with pytest.raises(InputError, match="goes by the clock: a day after it was made"):
        require_optimizer_apart(Net(), (torch.zeros(2, 4),), None, None, warming, None)


def by_rate(step: int) -> float:
    return SEEN["rate"]


def by_weight(seed: int) -> Iterator[object]:
    while True:
        yield (NETS[0].linear.weight.detach(),)


NETS = [Net()]


@pytest.mark.parametrize(
    ("net", "reader", "said"),
    [
        (Net(0.2), by_rate, r"lr_scale\(\) reads SEEN\['rate'\], which forward or loss leaves"),
        (
            NETS[0],
            by_weight,
            r"lr_scale\(\) reads the weight linear.weight, which training changes",
        ),
    ],
)
def test_rates_and_data_that_go_by_what_forward_leaves(net: Net, reader: Any, said: str) -> None:
    SEEN["rate"] = 0.1
    with pytest.raises(InputError, match=said) as caught:
        require_fed_nothing(net, (torch.zeros(2, 4),), None, None, {"lr_scale()": reader})
    assert (caught.value.at or "").startswith("test_outside.py:")
    assert SEEN["rate"] == 0.1


def test_rates_that_forward_does_not_touch_are_let_be() -> None:
    readers = {"lr_scale()": by_rate, "scheduler()": None, "batches()": steady}
    require_fed_nothing(Net(), (torch.zeros(2, 4),), None, None, readers)
