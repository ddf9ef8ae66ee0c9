"""Devices that make gradients of weights later: the same bits, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.runtime import Device, Stage, Training, adamw, deferred_layers
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.deferred import DeferringDevice
from bigbrain_fx.runtime.finite import NotFiniteError
from bigbrain_fx.runtime.local import Hub, LocalTransport

SIZE, MICRO_BATCHES = 16, 4


class Net(Stage):
    """Layers, a norm, dropout, one weight used twice."""

    returns = ("loss",)
    of: Any = nn

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = self.of.Linear(SIZE, 32), self.of.Linear(32, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            h = F.gelu(self.up(self.norm(x)))
            with self.seeded("drop"):
                x = x + F.dropout(self.down(h), 0.5)
        return x.square().mean()


class Tapped(Net):
    of = deferred_layers


class Both(Tapped):
    """Uses the weight of a layer that waits in another way, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.weight.square().mean()


class Plain(Device):
    name = "d0"
    names = ("d0",)
    micro_batches = MICRO_BATCHES
    stages: Mapping[int, type[Stage]] = {0: Net}
    loss = (0, "loss")

    def step_once(self) -> None:
        for m in range(MICRO_BATCHES):
            self.forward(0, m, x=self.batch("x", m))
        for m in range(MICRO_BATCHES):
            self.backward(0, m)
        self.optimizer_step()


class Divided(DeferringDevice):
    name = "d0"
    names = ("d0",)
    micro_batches = MICRO_BATCHES
    stages: Mapping[int, type[Stage]] = {0: Tapped}
    deferring = (0,)
    loss = (0, "loss")
    orders: Sequence[tuple[str, int]] = tuple(
        (action, m)
        for action in ("forward", "backward", "backward_weight")
        for m in range(MICRO_BATCHES)
    )

    def step_once(self) -> None:
        for action, m in self.orders:
            if action == "forward":
                self.forward(0, m, x=self.batch("x", m))
            else:
                getattr(self, action)(0, m)
        self.optimizer_step()


class InTurn(Divided):
    orders = tuple(
        (action, m)
        for m in range(MICRO_BATCHES)
        for action in ("forward", "backward", "backward_weight")
    )


class Again(Divided):
    recompute = (0,)


class AlsoUsed(Divided):
    stages: Mapping[int, type[Stage]] = {0: Both}


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed + step)
        yield {"x": torch.randn(8 * MICRO_BATCHES, SIZE, generator=dice)}


def ready(cls: type[Device]) -> Device:
    torch.manual_seed(0)
    weights = Net().state_dict()
    stream = Stream(batches, 0, {"x": ("x",)}, (), MICRO_BATCHES, torch.device("cpu"))
    device = cls(LocalTransport(Hub()), stream, 0, torch.device("cpu"))
    names = [name for name, _ in Net().named_parameters()]
    device.load(weights, dict.fromkeys(names, "d0"))
    device.train_with(Training(adamw))
    return device


@pytest.mark.gate("Again")
@pytest.mark.parametrize("cls", [Divided, InTurn, Again])
def test_a_device_trains_to_the_same_bits_whenever_weights_are_made(cls: type[Device]) -> None:
    plain, split = ready(Plain), ready(cls)
    for step in range(3):
        one, two = plain.run_step(step), split.run_step(step)
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)
    state = split.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state().items())


def test_weights_of_nothing_are_refused() -> None:
    device = ready(Divided)
    with pytest.raises(MisuseError, match="micro-batch 2: no gradients of weights wait"):
        device.backward_weight(0, 2)  # type: ignore[attr-defined]  # Divided's


def test_the_optimizer_does_not_step_while_gradients_wait() -> None:
    class Short(Divided):
        orders = Divided.orders[:-1]

    device = ready(Short)
    before = {name: tensor.clone() for name, tensor in device.state().items()}
    with pytest.raises(MisuseError, match="micro-batch 3: gradients of weights still wait"):
        device.run_step(0)
    after = device.state()
    assert all(torch.equal(before[name], after[name]) for name in device.parameters)


def test_a_weight_that_is_used_otherwise_too_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"stage 0: .* up\.weight waits, but something else"):
        ready(AlsoUsed).run_step(0)


def test_non_finite_values_are_named_by_stage_and_micro_batch() -> None:
    device = ready(InTurn)
    device.stream.advance(0)
    device.forward(0, 1, x=device.batch("x", 1))
    device.backward(0, 1)
    waits = device._waiting[0, 1]  # type: ignore[attr-defined]  # Divided's
    assert waits[-1].gradient is not None
    with torch.no_grad():
        waits[-1].gradient.data[3, 2] = float("nan")
    with pytest.raises(NotFiniteError, match=r"stage 0, micro-batch 1: .* down\.weight"):
        device.backward_weight(0, 1)  # type: ignore[attr-defined]  # Divided's
