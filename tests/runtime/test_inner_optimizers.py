"""State of optimizers inside another: by parameter name, as its own is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bigbrain_fx.runtime import optimizer_facts, optimizer_tensors, restore_optimizer

Named = dict[str, nn.Parameter]


class Wrapper(torch.optim.Optimizer):
    """Clips, and steps AdamW over all parameters and SGD over those that are called so."""

    def __init__(self, named: Named, of_sgd: str) -> None:
        every = list(named.values())
        super().__init__(every, {"clip": 1.0})
        chosen = [p for name, p in named.items() if name == of_sgd]
        sgd = [torch.optim.SGD(chosen, lr=0.1, momentum=0.9)] if chosen else []
        self.parts = [*sgd, torch.optim.AdamW(every, lr=0.1)]

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


def made(names: str, start: Named | None = None) -> tuple[Named, Wrapper]:
    """Return parameters and their optimizer, as a device that has them makes it."""
    named = {name: nn.Parameter(torch.ones(3)) for name in names}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start[name] if start else parameter)
    return named, Wrapper(named, "b")


def train(named: Named, optimizer: Wrapper, steps: int) -> None:
    for step in range(steps):
        for number, parameter in enumerate(named.values()):
            parameter.grad = torch.full((3,), 1.0 + step + number)
        optimizer.step()


def moved(named: Named, optimizer: Wrapper, names: str) -> tuple[Named, Wrapper]:
    """Give the state to a new optimizer of some of the parameters, as another device has them."""
    facts = optimizer_facts(optimizer, named, [None])
    tensors = {n: t.clone() for n, t in optimizer_tensors(optimizer, named).items()}
    own = {n: t for n, t in tensors.items() if n.rpartition(":")[2] in names}
    facts["scalars"] = {n: s for n, s in facts["scalars"].items() if n in names}
    other, again = made(names, named)
    restore_optimizer(again, other, [None], own, {"optimizer": facts})
    return other, again


def test_a_new_wrapper_goes_on_where_the_old_one_was() -> None:
    named, optimizer = made("ab")
    train(named, optimizer, 2)
    other, again = moved(named, optimizer, "ab")
    assert not again.state
    train(named, optimizer, 2)
    train(other, again, 2)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_state_finds_its_optimizer_on_a_device_that_makes_fewer() -> None:
    named, optimizer = made("ab")
    train(named, optimizer, 2)
    other, again = moved(named, optimizer, "a")
    assert set(again.parts[0].state[other["a"]]) == {"step", "exp_avg", "exp_avg_sq"}
    train({"a": named["a"], "b": named["b"]}, optimizer, 1)
    train(other, again, 1)
    assert torch.equal(named["a"], other["a"])
