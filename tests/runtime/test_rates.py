"""Learning rates by step: a scheduler made anew goes on where the old one was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.runtime.rates import RewindableRates

S = torch.optim.lr_scheduler
Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "step": lambda o: S.StepLR(o, 2, gamma=0.3),
    "exponential, by the last rate": lambda o: S.ExponentialLR(o, 0.7),
    "cosine, by the last rate": lambda o: S.CosineAnnealingLR(o, 7),
    "one cycle, with momentum": lambda o: S.OneCycleLR(o, 0.5, total_steps=12),
    "warm restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "one after another": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=2), S.PolynomialLR(o, 9)], [2]
    ),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)]),
    "lambda": lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def sgd() -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.zeros(2))], "lr": 0.3},
        {"params": [nn.Parameter(torch.zeros(3))]},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def seen(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_scheduler_made_anew_goes_on_as_torch_has_it(name: str) -> None:
    plain = sgd()
    scheduler, expected = SCHEDULERS[name](plain), []
    for _ in range(10):
        expected.append(seen(plain))
        scheduler.step()
    optimizer = sgd()
    rates = RewindableRates(optimizer, scheduler=SCHEDULERS[name])
    for step in (0, 1, 2, 3, 9, 8, 4):
        rates.rewind(step)
        assert seen(optimizer) == expected[step]
        rates.advance()
        if step < 9:
            assert seen(optimizer) == expected[step + 1]


def test_a_factor_scales_the_rates_as_they_were_made() -> None:
    optimizer = sgd()
    rates = RewindableRates(optimizer, lr_scale=lambda step: 0.5**step)
    for step in (0, 1, 3):
        rates.set(step)
        rates.advance()
        assert [lr for lr, _ in seen(optimizer)] == [0.3 * 0.5**step, 0.1 * 0.5**step]


def test_a_device_without_parameters_has_no_rates() -> None:
    rates = RewindableRates(None, scheduler=SCHEDULERS["step"])
    rates.set(0)
    rates.advance()
    rates.rewind(3)
    assert rates.base == []


def test_rates_that_are_tensors_are_not_written_into_what_is_kept() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))
    rates = RewindableRates(optimizer, scheduler=lambda o: S.StepLR(o, 1, gamma=0.5))
    for _ in range(3):
        rates.rewind(2)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.025)
