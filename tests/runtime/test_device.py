"""One device at work: sums in the promised order; clipping and learning rates as torch does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import Channel, Device, Stage, Training, adamw
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.local import Hub, LocalTransport
from bigbrain_fx.runtime.modules import WeightsError
from bigbrain_fx.runtime.stream import BatchError

ROWS, MICRO_BATCHES, STEPS = 6, 3, 4
F32 = torch.float32


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed + step)
        x, y = torch.randn(2, ROWS, 3, generator=dice).unbind()
        yield {"x": x, "y": y}


WEIGHTS = dict(
    zip("abc", torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(1)), strict=True)
)


# ------------------------------------------------------------------ two devices, one stage each


class First(Stage):
    returns = ("h",)
    a: Tensor

    def __init__(self) -> None:
        super().__init__(a=(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a)


class Last(Stage):
    returns = ("loss",)
    b: Tensor

    def __init__(self) -> None:
        super().__init__(b=(3, 3))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return (h @ self.b - y).pow(2).mean()


H = Channel(0, "activation", "h", 0, 1, "d0", "d1", (2, 3), F32, requires_grad=True)
H_GRAD = Channel(1, "gradient", "h", 1, 0, "d1", "d0", (2, 3), F32)
NORMS_TO_1 = Channel(2, "norm", "", 0, 1, "d0", "d1", (1,), F32)
NORMS_TO_0 = Channel(3, "norm", "", 1, 0, "d1", "d0", (1,), F32)


class Two(Device):
    names = ("d0", "d1")
    micro_batches = MICRO_BATCHES
    channels = (H, H_GRAD, NORMS_TO_1, NORMS_TO_0)


class Device0(Two):
    name = "d0"
    stages: Mapping[int, type[Stage]] = {0: First}

    def step_once(self) -> None:
        for m in range(MICRO_BATCHES):
            self.send(H, m, self.forward(0, m, x=self.batch("x", m)))
        for m in range(MICRO_BATCHES):
            self.backward(0, m, h=self.recv(H_GRAD, m))
        self.send_norms(NORMS_TO_1)
        self.recv_norms(NORMS_TO_0)
        self.optimizer_step()


class Device1(Two):
    name = "d1"
    stages: Mapping[int, type[Stage]] = {1: Last}
    loss = (1, "loss")

    def step_once(self) -> None:
        for m in range(MICRO_BATCHES):
            self.forward(1, m, h=self.recv(H, m), y=self.batch("y", m))
            self.send(H_GRAD, m, self.backward(1, m))
        self.send_norms(NORMS_TO_0)
        self.recv_norms(NORMS_TO_1)
        self.optimizer_step()


def made(cls: type[Device], hub: Hub, training: Training, owner: dict[str, str]) -> Device:
    where = torch.device("cpu")
    inputs = {"x": ("x",), "y": ("y",)}
    stream = Stream(batches, 0, inputs, (), cls.micro_batches, where)
    device = cls(LocalTransport(hub), stream, 0, where)
    device.load(WEIGHTS, owner)
    device.train_with(training)
    return device


def trained(training: Training, *classes: type[Device], owner: dict[str, str]) -> dict[str, Any]:
    """Train; return losses, the gradients of step 0 and the tensors at the end."""
    hub = Hub()
    devices = {cls.name: made(cls, hub, training, owner) for cls in classes}
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}

    def run(device: Device) -> None:
        for step in range(STEPS):
            loss = device.run_step(step)
            losses.extend([] if loss is None else [loss])
            if step == 0:
                gradients.update(device.first_gradients or {})

    hub.run({name: partial(run, device) for name, device in devices.items()})
    tensors = {n: t for d in devices.values() for n, t in d.state().items()}
    return {"losses": losses, "gradients": gradients, "tensors": tensors}


def plainly(training: Training, names: str = "ab") -> dict[str, Any]:
    """Train the same model the way everyone does, without stages."""
    parameters = {name: nn.Parameter(WEIGHTS[name].clone()) for name in names}
    optimizer = training.optimizer(list(parameters.items()))
    base = optimizer.param_groups[0]["lr"]
    losses, stream = [], batches(0)
    gradients: dict[str, Tensor] = {}
    for step, batch in zip(range(STEPS), stream, strict=False):
        parts = []
        for x, y in zip(batch["x"].split(2), batch["y"].split(2), strict=True):
            h = torch.tanh(x @ parameters["a"])
            loss = (h @ parameters["b"] - y).pow(2).mean()
            (loss / MICRO_BATCHES).backward()
            parts.append(loss.detach())
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), training.clip_norm)
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        if training.lr_scale is not None:
            optimizer.param_groups[0]["lr"] = base * training.lr_scale(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).mean())
    tensors = {name: p.detach() for name, p in parameters.items()}
    return {"losses": losses, "gradients": gradients, "tensors": tensors}


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(named), lr=0.5, momentum=0.9)


@pytest.mark.gate("clip")
@pytest.mark.parametrize(
    "training",
    [
        Training(adamw),
        Training(sgd, lr_scale=lambda step: (0.0, 1.0, 0.5, 2.0)[step]),
        Training(sgd, clip_norm=0.25),
        Training(adamw, lr_scale=lambda step: 1 / (step + 1), clip_norm=1e9),
    ],
    ids=["adamw", "lr_scale", "clip", "both"],
)
def test_two_devices_train_as_one(training: Training) -> None:
    """Bit for bit: losses, the (clipped) gradients of step 0, and all weights at the end."""
    found = trained(training, Device0, Device1, owner={"a": "d0", "b": "d1"})
    expected = plainly(training)
    assert [x.item() for x in found["losses"]] == [x.item() for x in expected["losses"]]
    assert found["gradients"].keys() == expected["gradients"].keys() == {"a", "b"}
    for name, gradient in expected["gradients"].items():
        assert torch.equal(found["gradients"][name], gradient)
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor)


class Alone(Device):
    """Both stages on one device: nothing is sent."""

    name = "d0"
    names = ("d0",)
    micro_batches = MICRO_BATCHES
    stages: Mapping[int, type[Stage]] = {0: First, 1: Last}
    loss = (1, "loss")

    def step_once(self) -> None:
        there = Channel(0, "activation", "h", 0, 1, "d0", "d0", (2, 3), F32, requires_grad=True)
        back = Channel(1, "gradient", "h", 1, 0, "d0", "d0", (2, 3), F32)
        for m in range(MICRO_BATCHES):
            self.send(there, m, self.forward(0, m, x=self.batch("x", m)))
            self.forward(1, m, h=self.recv(there, m), y=self.batch("y", m))
            self.send(back, m, self.backward(1, m))
            self.backward(0, m, h=self.recv(back, m))
        self.optimizer_step()


def test_one_device_clips_without_asking_anyone() -> None:
    training = Training(sgd, clip_norm=0.25)
    found = trained(training, Alone, owner={"a": "d0", "b": "d0"})
    expected = plainly(training)
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor)


def test_clipping_without_the_others_norms_is_refused() -> None:
    """Set in training.py after the split: nobody was told to send them."""
    training = Training(sgd, clip_norm=0.25)
    with pytest.raises(RuntimeError, match="clipping needs the norms of device d1"):
        trained(training, Alone, owner={"a": "d0", "b": "d1"})


def test_clipping_changes_what_it_should() -> None:
    """The limit of the test above is one that matters."""
    gradients = plainly(Training(sgd))["gradients"].values()
    assert torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])) > 2 * 0.25


def test_a_step_that_is_scaled_to_nothing_changes_nothing() -> None:
    still = Training(sgd, lr_scale=lambda _: 0.0)
    found = trained(still, Device0, Device1, owner={"a": "d0", "b": "d1"})
    assert torch.equal(found["tensors"]["a"], WEIGHTS["a"])


def test_devices_that_read_other_data_are_stopped() -> None:
    hub = Hub()
    training = Training(sgd)
    devices = [made(cls, hub, training, {"a": "d0", "b": "d1"}) for cls in (Device0, Device1)]
    devices[1].stream = Stream(batches, 1, {"x": ("x",), "y": ("y",)}, (), 3, torch.device("cpu"))
    with pytest.raises(BatchError, match="the batch of step 0 differs between devices"):
        hub.run({d.name: partial(d.run_step, 0) for d in devices})


# ------------------------------------------------------------------ tied weights


class Use(Stage):
    """Multiply by the shared weight."""

    returns = ("h",)
    a: Tensor

    def __init__(self) -> None:
        super().__init__(a=(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a)


class UseLast(Stage):
    """Multiply by it once more, under the name it has here."""

    returns = ("loss",)
    c: Tensor

    def __init__(self) -> None:
        super().__init__(c=(3, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ self.c - y).pow(2).mean()


def inner(tag: int, kind: str, source: int, target: int, a: str = "d0", b: str = "d0") -> Channel:
    return Channel(tag, kind, "h", source, target, a, b, (2, 3), F32, kind == "activation")


H1, H2 = inner(0, "activation", 0, 1), inner(1, "activation", 1, 2, "d0", "d1")
G2, G1 = inner(2, "gradient", 2, 1, "d1", "d0"), inner(3, "gradient", 1, 0)


def tied(tag: int, source: int, target: int, a: str, b: str) -> Channel:
    return Channel(tag, "tied", "a", source, target, a, b, (3, 3), F32)


T2, T0, T1 = tied(4, 2, 0, "d1", "d0"), tied(5, 0, 2, "d0", "d1"), tied(6, 1, 2, "d0", "d1")


class Tied(Device):
    """Three stages use one weight; two of them live on d0."""

    names = ("d0", "d1")
    micro_batches = MICRO_BATCHES
    channels = (H1, H2, G2, G1, T2, T0, T1)
    tied: Mapping[str, tuple[int, ...]] = {"a": (0, 1, 2)}
    aliases: Mapping[str, str] = {"c": "a"}


class Tied0(Tied):
    name = "d0"
    stages: Mapping[int, type[Stage]] = {0: Use, 1: Use}

    def step_once(self) -> None:
        for m in range(MICRO_BATCHES):
            self.send(H1, m, self.forward(0, m, x=self.batch("x", m)))
            self.send(H2, m, self.forward(1, m, x=self.recv(H1, m)))
        for m in range(MICRO_BATCHES):
            self.send(G1, m, self.backward(1, m, h=self.recv(G2, m)))
            self.backward(0, m, h=self.recv(G1, m))
        for channel in (T0, T1):
            self.send_tied(channel)
        self.recv_tied(T2)
        self.optimizer_step()


class Tied1(Tied):
    name = "d1"
    stages: Mapping[int, type[Stage]] = {2: UseLast}
    loss = (2, "loss")

    def step_once(self) -> None:
        for m in range(MICRO_BATCHES):
            self.forward(2, m, x=self.recv(H2, m), y=self.batch("y", m))
            self.send(G2, m, self.backward(2, m))
        self.send_tied(T2)
        for channel in (T0, T1):
            self.recv_tied(channel)
        self.optimizer_step()


def leaf_gradients() -> list[Tensor]:
    """Return the gradient of each of the three uses at step 0, summed over micro-batches."""
    sums: list[Tensor] = []
    batch = next(batches(0))
    for x, y in zip(batch["x"].split(2), batch["y"].split(2), strict=True):
        leaves = [WEIGHTS["a"].clone().requires_grad_() for _ in range(3)]
        h = torch.tanh(torch.tanh(x @ leaves[0]) @ leaves[1])
        loss = (h @ leaves[2] - y).pow(2).mean()
        found = torch.autograd.grad(loss, leaves, torch.tensor(1 / MICRO_BATCHES))
        sums = [s + g for s, g in zip(sums, found, strict=True)] if sums else list(found)
    return sums


def test_tied_gradients_are_summed_last_stage_first() -> None:
    WEIGHTS["c"] = WEIGHTS["a"]
    found = trained(Training(sgd), Tied0, Tied1, owner={"a": "d0"})
    first, middle, last = leaf_gradients()
    assert torch.equal(found["gradients"]["a"], (last + middle) + first)
    assert not torch.equal((last + middle) + first, (first + middle) + last)


@pytest.mark.nightly
def test_tied_weights_stay_tied() -> None:
    WEIGHTS["c"] = WEIGHTS["a"]
    for training in (Training(sgd), Training(adamw)):
        found = trained(training, Tied0, Tied1, owner={"a": "d0"})
        assert torch.equal(found["tensors"]["a"], found["tensors"]["c"])
        assert not torch.equal(found["tensors"]["a"], WEIGHTS["a"])


def test_one_device_holds_a_tied_weight_once() -> None:
    WEIGHTS["c"] = WEIGHTS["a"]
    device = made(Tied0, Hub(), Training(sgd), {"a": "d0"})
    assert list(device.parameters) == ["a"]
    assert device.modules[0].a is device.modules[1].a


def test_an_index_of_other_parameters_is_refused() -> None:
    """One too many has no norm to send."""
    said = "'b' has the owner d0, which holds none of that name"
    with pytest.raises(WeightsError, match=said):
        made(Device0, Hub(), Training(sgd), {"a": "d0", "b": "d0"})


def test_a_parameter_without_an_owner_is_not_trained() -> None:
    """No gradient reaches it: it is used under `no_grad` only, and the optimizer never sees it."""
    assert not made(Device0, Hub(), Training(sgd), {"other": "d1"}).parameters


def test_an_index_without_any_owner_is_refused() -> None:
    """It would train nothing, and say so to nobody."""
    said = "expected the owner of each trained parameter, as of 'a', found none"
    with pytest.raises(WeightsError, match=said):
        made(Device0, Hub(), Training(sgd), {})


def test_a_missing_tensor_is_named() -> None:
    device = Device0.__new__(Device0)
    stream = Stream(batches, 0, {}, (), 1, torch.device("cpu"))
    device.__init__(LocalTransport(Hub()), stream, 0, torch.device("cpu"))  # type: ignore[misc]
    with pytest.raises(KeyError, match="a"):
        device.load({}, {"a": "d0"})
