"""Learning rates and loss scales by step are those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from bigbrain_fx.runtime.loss_scale import LossScale, are_finite, unscaled
from bigbrain_fx.runtime.planned_sums import share_of
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


# --------------------------------------------------------------------------- the loss scale


OPTIONS = st.fixed_dictionaries(
    {
        "init_scale": st.floats(1e-3, 1e30),
        "growth_factor": st.floats(1.01, 1e9),
        "backoff_factor": st.floats(0.01, 0.99),
        "growth_interval": st.integers(1, 4),
    }
)


@settings(deadline=None)  # torch imports more with its first scaler
@given(OPTIONS, st.lists(st.booleans(), max_size=12))
def test_the_loss_scale_changes_as_torchs(options: dict[str, float], fine: list[bool]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torchs = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    ours = LossScale(**options)  # type: ignore[arg-type]
    for all_fine in fine:
        torchs.scale(torch.zeros(()))
        assert ours.scale == torchs.get_scale()
        scaled = torch.tensor([1.0, -0.3, 7e-5]) * (1.0 if all_fine else math.inf)
        weight.grad = scaled.clone()
        torchs.unscale_(optimizer)
        if all_fine:
            assert torch.equal(unscaled({"w": scaled}, ours.scale)["w"], weight.grad)
        assert are_finite([scaled]) == all_fine
        torchs.step(optimizer)
        torchs.update()
        ours.update(all_fine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [65536.0, 2.0**24, 1000.0])
def test_the_loss_starts_with_what_autograd_would_give_it(dtype: torch.dtype, scale: float) -> None:
    for count in (1, 2, 3, 7):
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        torchs = torch.amp.GradScaler("cpu", init_scale=scale)
        torchs.scale(loss / count).backward()
        assert loss.grad is not None
        seed = torch.full_like(loss.detach(), LossScale(scale).scale)
        assert torch.equal(share_of(seed, (1,) * count, 0), loss.grad)


def test_the_loss_scale_resumes_from_a_checkpoint() -> None:
    one = LossScale(8.0, growth_interval=3)
    for fine in (True, True, False, True, True):
        one.update(fine)
    other = LossScale(8.0, growth_interval=3)
    other.restore(one.facts())
    one.update(True)
    other.update(True)
    assert one.facts() == other.facts() == [8.0, 0]
    other.restore(None)
    assert other.facts() == [8.0, 0]
