"""Loops drawn from what training loops do between two steps, beside the same in plain PyTorch."""

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import bigbrain_fx as bb
from tests.support.command_line import write_cluster

STEPS, ROWS = 6, 8


class Net(nn.Module):
    """Two layers share a weight; a part has a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.b, self.again = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.again.weight = self.b.weight
        self.c, self.scale = nn.Linear(16, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.a(x) * self.scale))
        return self.c(torch.tanh(self.again(torch.tanh(self.b(h)))))


class Loop:
    """A model, its optimizer, and all that the changes below write."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = make(self.model.parameters(), lr=0.02)
        self.rates = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 3)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.average = {n: t.clone() for n, t in self.model.state_dict().items()}
        self.beta, self.weights, self.seen = 0.0, torch.ones(4), [0.0]
        self.kept: Any = None

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        error = self.weights * (output - batch["y"]).square()
        taught = F.mse_loss(output, self.teacher(batch["x"]))
        return error.mean() + 0.3 * taught + self.beta * output.square().mean()

    def step(self, batch: Mapping[str, Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(batch["x"]), batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def numbers(self) -> list[Tensor]:
        """Return all that a loop leaves: weights, the optimizer's state, what it has read."""
        state = self.optimizer.state_dict()["state"]
        moments = [state[n][key] for n in sorted(state) for key in sorted(state[n])]
        seen = torch.tensor(self.seen)
        moments = [t for t in moments if isinstance(t, Tensor)]
        return [*self.model.state_dict().values(), *moments, *self.average.values(), seen]


Change = Callable[[Loop, int], object]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@change
def rate(loop: Loop, _n: int) -> None:
    loop.rates.step()


@change
def decay(loop: Loop, n: int) -> None:
    for group in loop.optimizer.param_groups:
        group["weight_decay"] = 0.01 * n


@change
def annealed(loop: Loop, n: int) -> None:
    loop.beta = 0.1 * n


@change
def weights(loop: Loop, n: int) -> None:
    loop.weights = torch.softmax(torch.arange(4.0) * n, 0) * 4


@change
def weights_in_place(loop: Loop, _n: int) -> None:
    loop.weights.mul_(1.1)


@change
def scaled(loop: Loop, n: int) -> None:
    loop.model.scale = 1.0 - 0.05 * n


@change
def taught(loop: Loop, _n: int) -> None:
    with torch.no_grad():
        pairs = zip(loop.teacher.parameters(), loop.model.parameters(), strict=True)
        for mean, weight in pairs:
            mean.lerp_(weight, 0.5)


@change
def averaged(loop: Loop, _n: int) -> None:
    for name, tensor in loop.model.state_dict().items():
        loop.average[name].lerp_(tensor, 0.1)


@change
def clamped(loop: Loop, _n: int) -> None:
    for parameter in loop.model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


@change
def in_turn(loop: Loop, n: int) -> None:
    if n in (1, 3):
        loop.model.c.requires_grad_(n == 3)


@change
def restored(loop: Loop, n: int) -> None:
    if n == 1:
        loop.kept = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    if n == 3:
        loop.model.load_state_dict(loop.kept[0])
        loop.optimizer.load_state_dict(loop.kept[1])


@change
def forgotten(loop: Loop, n: int) -> None:
    """As ReLoRA: moments are made smaller where they are."""
    for own in loop.optimizer.state.values() if n in (1, 3) else ():
        for value in own.values():
            if isinstance(value, Tensor) and value.dim():
                value.mul_(0.5)


@change
def validated(loop: Loop, n: int) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.seen.append(float(loop.model(torch.ones(2, 6) * n).sum()))
    loop.model.train()


WAYS: tuple[dict[str, Any], ...] = (
    {"micro_batches": 1},
    {"micro_batches": 4},
    {"micro_batches": 4, "schedule": "zb-h1"},
    {"micro_batches": 2, "recompute": "all"},
    {"replicas": 2},
    {"replicas": 2, "zero_stage": 3, "sum_order": "micro"},
    {"partitioner": "auto"},
)


def batches() -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(5)
    drawn = [torch.randn(ROWS, 6, generator=dice) for _ in range(STEPS)]
    return [
        {"x": x, "y": torch.stack([x.sum(1), x[:, 0], x[:, 1], x.abs().sum(1)], 1)} for x in drawn
    ]


def kill_one(session: Any, dice: random.Random) -> None:
    pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
    os.kill(pids[dice.choice(sorted(pids))], signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(14))
def test_a_drawn_loop_trains_as_in_plain_pytorch(seed: int, tmp_path: Path) -> None:
    """Micro-batches and replicas round their sums otherwise than the whole batch."""
    dice = random.Random(seed)
    make = dice.choice([SGD, Adam, AdamW])
    drawn = dice.sample(sorted(CHANGES), 3)
    options = bb.Options(**{"partitioner": "naive", **WAYS[seed % len(WAYS)]})
    plain, loop = Loop(make), Loop(make)
    machine = bb.machine(write_cluster(tmp_path))
    about: dict[str, Any] = {"rehearse": False, "options": options}
    about |= {"loss": loop.loss, "optimizer": loop.optimizer, "example_batch": batches()[0]}
    with machine(loop.model, **about) as session:
        for n, batch in enumerate(batches()):
            assert session.step(batch) == pytest.approx(plain.step(batch), rel=1e-5), drawn
            for name in drawn:
                CHANGES[name](plain, n)
                CHANGES[name](loop, n)
            if n == 2:
                kill_one(session, dice)
    pairs = zip(plain.numbers(), loop.numbers(), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs), drawn
