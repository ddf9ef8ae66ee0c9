"""An optimizer's file goes on in plain PyTorch: schedulers and a scaler, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bigbrain_fx.runtime.optimizer_state import optimizer_facts, optimizer_tensors
from bigbrain_fx.runtime.plain import load_optimizer
from bigbrain_fx.runtime.rates import RewindableRates

S = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: S.OneCycleLR(o, 0.5, total_steps=12),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "lambda": lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: S.CosineAnnealingLR(o, 7),
    "linear": lambda o: S.LinearLR(o, 0.1, total_iters=9),
    "plateaus": lambda o: S.MultiStepLR(o, [2, 5, 7]),
    "one after another": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=3), S.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1), S.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
}
STEPS, AT = 10, 4


def made() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [net.weight], "lr": 0.3}, {"params": [net.bias]}]
    return net, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def seen(net: nn.Linear, optimizer: torch.optim.Optimizer) -> list[object]:
    return [net.weight.tolist(), net.bias.tolist()] + [
        (group["lr"], group["momentum"]) for group in optimizer.param_groups
    ]


def update(net: nn.Linear, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    net(torch.full((1, 3), 1.0 + step)).square().sum().backward()
    optimizer.step()


def keep(
    net: nn.Linear, optimizer: torch.optim.Optimizer, file: Path, base: list[Any], **more: object
) -> dict[str, Tensor]:
    """Write what `export --optimizer` does; return the model's tensors."""
    named = dict(net.named_parameters())
    facts = {"step": AT, "optimizer": optimizer_facts(optimizer, named, base), **more}
    save_file(optimizer_tensors(optimizer, named), file, {"facts": json.dumps(facts)})
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """The half as a bundle trains it, the rest and the whole as PyTorch does."""
    make, file = SCHEDULERS[name], tmp_path / "optimizer.safetensors"
    net, optimizer = made()
    scheduler, expected = make(optimizer), []
    for step in range(STEPS):
        update(net, optimizer, step)
        scheduler.step()
        expected.append(seen(net, optimizer))
    net, optimizer = made()
    rates = RewindableRates(optimizer, scheduler=make)
    for step in range(AT):
        update(net, optimizer, step)
        rates.advance()
    model = keep(net, optimizer, file, rates.base)
    net, optimizer = made()
    net.load_state_dict(model)
    scheduler = make(optimizer)
    assert load_optimizer(net, optimizer, file, scheduler=scheduler) == AT
    for step in range(AT, STEPS):
        update(net, optimizer, step)
        scheduler.step()
        assert seen(net, optimizer) == expected[step]


def test_only_a_new_scheduler_of_the_optimizer_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "optimizer.safetensors"
    net, optimizer = made()
    update(net, optimizer, 0)
    keep(net, optimizer, file, [0.3, 0.1])
    other = S.ExponentialLR(made()[1], 0.9)
    with pytest.raises(ValueError, match="of another optimizer"):
        load_optimizer(net, optimizer, file, scheduler=other)
    stepped = S.ExponentialLR(optimizer, 0.9)
    update(net, optimizer, 1)
    stepped.step()
    with pytest.raises(ValueError, match="is at 1: make it anew"):
        load_optimizer(net, optimizer, file, scheduler=stepped)


def test_a_scaler_gets_its_scale_and_keeps_its_ways(tmp_path: Path) -> None:
    file = tmp_path / "optimizer.safetensors"
    net, optimizer = made()
    update(net, optimizer, 0)
    keep(net, optimizer, file, [0.3, 0.1], loss_scale=[512.0, 3])
    fresh = torch.amp.GradScaler("cpu", growth_interval=7)
    for lacking in (None, torch.amp.GradScaler("cpu", enabled=False)):
        with pytest.raises(ValueError, match="training had a loss scale, 512 by now"):
            load_optimizer(net, optimizer, file, lacking)
    load_optimizer(net, optimizer, file, fresh)
    assert fresh.get_scale() == 512.0
    assert fresh.state_dict()["_growth_tracker"] == 3
    assert fresh.get_growth_interval() == 7
