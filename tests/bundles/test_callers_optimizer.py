"""Options of the caller's optimizer: what a loop sets in its groups reaches the devices."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

import bigbrain_fx as bb
from bigbrain_fx.bundles.callers.optimizer import CallersOptimizer
from tests.support.command_line import write_cluster
from tests.support.messages import refused

STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def batches() -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    drawn = [torch.randn(8, 4, generator=dice) for _ in range(STEPS)]
    return [{"x": x, "y": x.sum(1, keepdim=True)} for x in drawn]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def grouped(model: Net) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": model.a.parameters(), "lr": 0.2},
        {"params": model.b.parameters()},
    ]
    return SGD(groups, lr=0.1, momentum=0.9)


class ByHand:
    """Sets what it likes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups

    def step(self) -> None:
        for group in self.groups:
            group["lr"], group["weight_decay"] = group["lr"] / 2, 0.1


def cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8)


def warm_up(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))


def plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def step_of(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def plain(make: Callable[[Net], Optimizer], schedule: Callable[[Optimizer], Any]) -> Net:
    model = net()
    optimizer = make(model)
    scheduler = schedule(optimizer)
    for batch in batches():
        optimizer.zero_grad()
        value = loss(model(batch["x"]), batch)
        value.backward()
        optimizer.step()
        step_of(scheduler, value.item())
    return model


@pytest.mark.gate("cycle")
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (grouped, cycle),  # of momentum, too
        (lambda model: AdamW(model.parameters(), lr=1e-2), warm_up),
        (grouped, plateau),
        (lambda model: Adam(model.parameters(), lr=1e-2), ByHand),
        (lambda model: AdamW(model.parameters(), lr=1e-2), cycle),  # of betas
    ],
    ids=["cycle", "warm-up", "plateau", "by-hand", "betas"],
)
def test_a_scheduler_of_the_loop_sets_the_rates_of_all_devices(
    make: Callable[[Net], Optimizer], schedule: Callable[[Optimizer], Any], tmp_path: Path
) -> None:
    model, given = net(), batches()
    optimizer = make(model)
    scheduler = schedule(optimizer)
    about: Any = {"example_batch": given[0], "loss": loss, "optimizer": optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a scheduler before the optimizer
        with bb.machine(write_cluster(tmp_path))(
            model, options=bb.Options("naive", micro_batches=1), **about
        ) as session:
            for number, batch in enumerate(given):
                step_of(scheduler, session.step(batch))
                pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
                if number == STEPS // 2:
                    os.kill(pids["d1"], signal.SIGKILL)
    assert session.done is not None
    assert session.done.restarts == 1
    want, have = plain(make, schedule).state_dict(), model.state_dict()
    assert [name for name, tensor in want.items() if not torch.equal(tensor, have[name])] == []


def callers(*, is_set_there: bool = False) -> tuple[Optimizer, CallersOptimizer]:
    optimizer = grouped(net())
    return optimizer, CallersOptimizer(optimizer, is_set_there=is_set_there)


def test_options_are_sent_once_they_have_changed() -> None:
    optimizer, watched = callers()
    assert watched.entries() == {}
    first = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    assert watched.entries()["optimizer.lr"].tolist() == [0.5, 0.1]
    optimizer.param_groups[0]["lr"] = first
    assert watched.entries()["optimizer.lr"].tolist() == [0.2, 0.1]  # the devices have the other


def test_a_group_more_is_refused() -> None:
    optimizer, watched = callers()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with refused("BX3190"):
        watched.entries()


def test_two_that_set_the_rates_are_refused() -> None:
    optimizer, watched = callers(is_set_there=True)
    assert watched.entries() == {}
    optimizer.param_groups[0]["lr"] = 0.5
    with refused("BX3191"):
        watched.entries()


def test_an_option_that_is_no_number_is_refused() -> None:
    optimizer, watched = callers()
    optimizer.param_groups[0]["nesterov"] = True
    with refused("BX3192"):
        watched.entries()


def test_a_state_that_is_read_is_the_devices_and_a_write_into_it_is_heard() -> None:
    optimizer, watched = callers()
    weight, steps = optimizer.param_groups[0]["params"][0], 0

    def give() -> None:
        with watched.gets_state():
            optimizer.state.clear()
            optimizer.state[weight] = {"step": steps, "momentum_buffer": torch.full((1,), steps)}

    watched.enter(contextlib.nullcontext, lambda: steps, give)
    steps = 1
    assert optimizer.state[weight]["step"] == 1
    assert not watched.is_loaded
    steps = 2
    assert next(iter(copy.deepcopy(optimizer.state))) is not weight
    assert optimizer.state[weight]["step"] == 2
    assert watched.entries() == {}
    optimizer.state[weight]["momentum_buffer"].zero_()
    with refused("BX3198"):
        watched.entries()
    watched.begin_again()
    assert watched.entries() == {}
    optimizer.state[weight]["step"] = 0
    with refused("BX3198"):
        watched.entries()
    watched.leave()
    assert type(optimizer.state) is defaultdict
    assert next(iter(optimizer.state)) is weight
