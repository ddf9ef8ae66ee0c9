"""A user's scheduler is tried on every device's optimizer before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.per_device_scheduler import require_scheduled

S = torch.optim.lr_scheduler
HELD = {"d0": ["0.weight", "0.bias"], "d1": ["2.weight", "2.bias"], "d2": []}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def two_groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    biases = [p for n, p in named if n.endswith("bias")]
    rest = [p for n, p in named if not n.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": biases, "lr": 0.2}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.1)


def test_schedulers_of_the_number_of_steps_pass() -> None:
    for make in (lambda o: S.CosineAnnealingLR(o, 5), lambda o: S.OneCycleLR(o, 0.1, 9)):
        require_scheduled(net(), torch.optim.AdamW, make, HELD)
    require_scheduled(net(), None, lambda o: S.StepLR(o, 1), HELD)
    by_group = lambda o: S.LambdaLR(o, [lambda t: 1.0, lambda t: 0.5**t])  # noqa: E731
    require_scheduled(net(), two_groups, by_group, HELD)


def refused(
    scheduler: Callable[..., Any], optimizer: Callable[..., Any] = two_groups
) -> InputError:
    with pytest.raises(InputError) as error:
        require_scheduled(net(), optimizer, scheduler, HELD)
    return error.value


def test_one_that_wants_the_loss_is_refused() -> None:
    assert "step(metrics) cannot be called" in refused(S.ReduceLROnPlateau).what


def test_no_scheduler_is_refused() -> None:
    assert "must return a scheduler, found NoneType" in refused(lambda o: None).what


def test_one_that_fails_on_a_device_is_refused() -> None:
    def picky(optimizer: torch.optim.Optimizer) -> Any:
        return S.LambdaLR(optimizer, [lambda t: 1.0] * 2)

    def one_group_on_d1(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        return two_groups(named) if "0.bias" in dict(named) else torch.optim.SGD(named, lr=0.1)

    found = refused(picky, one_group_on_d1)
    assert "fails on the optimizer of device d1: ValueError: Expected 1 lr_lambdas" in found.what


def test_one_that_counts_by_parameters_is_refused() -> None:
    def by_size(optimizer: torch.optim.Optimizer) -> Any:
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return S.LambdaLR(optimizer, lambda t: 0.9 ** (t * count))

    found = refused(by_size).what
    assert "gives 0.bias at step 1 the lr" in found or "gives 0.weight at step 1 the lr" in found
    assert "on device d0" in found


def test_one_that_keeps_a_count_elsewhere_is_refused() -> None:
    calls = []

    def counting(optimizer: torch.optim.Optimizer) -> Any:
        calls.append(1)
        made = len(calls)
        return S.LambdaLR(optimizer, lambda t: 1.0 / (made + t))

    assert "on device d0" in refused(counting).what
