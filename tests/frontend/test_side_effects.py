"""Data and rates that change what forward computes are refused; those that do not, are let be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.side_effects import may_write, require_no_side_effects

SCALE = 1.0
CALLS = [0]
LOADER = DataLoader(TensorDataset(torch.ones(8, 6), torch.ones(8, 4)), batch_size=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.seen = nn.Linear(6, 4), nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)) * SCALE


def example() -> dict[str, Any]:
    return {"x": torch.ones(4, 6), "y": torch.ones(4, 4)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def asked(net: Net, **functions: Any) -> None:  # those of a model file
    require_no_side_effects(net, example(), loss, None, **functions)


def test_batches_that_lower_a_dropout_rate_are_refused() -> None:
    net = Net()

    def batches(seed: int) -> Iterator[object]:
        for step in range(9):
            net.drop.p = 0.5 / (step + 1)
            yield example()

    with pytest.raises(InputError, match=r"batches\(\) changes drop.p, and what forward") as why:
        asked(net, batches=batches)
    assert "test_side_effects.py" in str(why.value.at)
    assert net.drop.p == 0.5  # as it was


def test_batches_that_freeze_a_part_are_refused_with_rates_of_zero() -> None:
    net = Net()

    def batches(_: int) -> Iterator[dict[str, Any]]:
        for step in range(100):
            net.linear.requires_grad_(step % 2 == 0)
            yield example()

    with pytest.raises(InputError, match=r"batches\(\) changes linear.weight.requires_grad") as why:
        asked(net, batches=batches)
    assert why.value.help is not None
    assert "let scheduler(optimizer) return torch.optim.lr_scheduler.LambdaLR" in why.value.help


def test_a_number_of_the_file_that_forward_reads_is_refused() -> None:
    def lr_scale(step: int) -> float:
        global SCALE
        SCALE = 1.0 / (step + 1)
        return 1.0

    with pytest.raises(InputError, match=r"lr_scale\(\) changes .*SCALE"):
        asked(Net(), lr_scale=lr_scale)
    assert SCALE == 1.0


def test_a_rate_that_counts_its_calls_is_refused() -> None:
    def lr_scale(step: int) -> float:
        CALLS[0] += 1
        return 1.0 / CALLS[0]

    with pytest.raises(InputError, match=r"lr_scale\(0\) is 1 first and 0.2 when it is asked"):
        asked(Net(), lr_scale=lr_scale)


def test_what_forward_does_not_read_may_be_written() -> None:
    net = Net()

    def batches(seed: int) -> Iterator[object]:
        for step in range(9):
            net.seen = step
            yield example()

    assert may_write(batches)
    asked(net, batches=batches)
    assert net.seen == 0


def test_data_that_write_nothing_are_not_drawn() -> None:
    def batches(seed: int) -> Iterable[object]:
        rows = {}
        for x, y in LOADER:
            rows["x"], rows["y"] = x, y
            yield rows

    assert not may_write(batches)


def test_data_that_fail_here_are_let_be() -> None:
    net = Net()

    def batches(seed: int) -> Iterator[object]:
        net.drop.train()
        raise FileNotFoundError("the data are elsewhere")
        yield

    asked(net, batches=batches)


BETA = {"value": 1.0, "calls": 0}


class Annealing(torch.optim.SGD):
    """Moves a number of the file with each step, as its scheduler does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        super().step()
        BETA["calls"] += 1
        BETA["value"] = 1.0 if BETA["calls"] < 500 else 0.5


class Halving(torch.optim.lr_scheduler.LambdaLR):
    def step(self, epoch: int | None = None) -> None:
        super().step()
        BETA["value"] *= 0.5


def weighed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return loss(output, batch) * BETA["value"]


def annealing(named: Any) -> torch.optim.Optimizer:
    return Annealing(named, lr=0.1)


def halving(optimizer: torch.optim.Optimizer) -> Halving:
    return Halving(optimizer, float)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"scheduler": halving}, "scheduler"),
        ({"optimizer": annealing}, "optimizer"),
    ],
)
def test_steps_that_change_what_the_loss_reads_now_or_much_later(made: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"a step of {said}\(\) changes .*BETA"):
        require_no_side_effects(Net(), example(), weighed, None, **made)
    assert BETA["value"] == 1.0
    require_no_side_effects(Net(), example(), loss, None, **made)


def test_rates_by_the_clock() -> None:
    start_s = time.time()
    with pytest.raises(InputError, match=r"lr_scale\(0\) is 1 first and 0.1 a day later"):
        asked(Net(), lr_scale=lambda step: 1.0 if time.time() - start_s < 3_600 else 0.1)
