"""A forward that keeps nothing, and its second run: the same bits, written once, drawn again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.runtime import Device, Stage, Training, adamw, buffer
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.local import Hub, LocalTransport
from bigbrain_fx.runtime.pipelining import Relay
from bigbrain_fx.runtime.recompute import Twice

SIZE, MICRO_BATCHES = 64, 3
WEIGHTS = {
    "w": torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)) / 8,
    "mean": torch.zeros(SIZE),
    "count": torch.tensor(0),
    "table": torch.arange(4096.0),
}


class Tracking(Stage):
    """Reads the mean of what it saw before, writes it, and draws."""

    returns = ("loss",)
    w: Tensor
    mean: Tensor
    count: Tensor
    runs = 0

    def __init__(self) -> None:
        super().__init__(
            w=(SIZE, SIZE),
            mean=buffer(SIZE),
            count=buffer(dtype=torch.int64),
            table=buffer(4096),
        )

    def forward(self, x: Tensor) -> Tensor:
        Tracking.runs += 1
        y = torch.tanh(x @ self.w) - self.mean
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.count.add_(1)
        with self.seeded():
            y = torch.nn.functional.dropout(y, 0.5)
        return (y * torch.sigmoid(y)).square().mean()


class Plain(Device):
    name = "d0"
    names = ("d0",)
    micro_batches = MICRO_BATCHES
    stages: Mapping[int, type[Stage]] = {0: Tracking}
    loss = (0, "loss")

    def step_once(self) -> None:
        for m in range(MICRO_BATCHES):
            self.forward(0, m, x=self.batch("x", m))
        for m in range(MICRO_BATCHES):
            self.backward(0, m)
        self.optimizer_step()


class Again(Plain):
    recompute: tuple[int, ...] = (0,)


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed + step)
        yield {"x": torch.randn(32 * MICRO_BATCHES, SIZE, generator=dice)}


def made(cls: type[Device]) -> Device:
    stream = Stream(batches, 0, {"x": ("x",)}, (), MICRO_BATCHES, torch.device("cpu"))
    device = cls(LocalTransport(Hub()), stream, 0, torch.device("cpu"))
    device.load(WEIGHTS, {"w": "d0"})
    device.train_with(Training(adamw))
    return device


def trained(cls: type[Device]) -> tuple[list[Tensor | None], Tensor, dict[str, Tensor]]:
    device = made(cls)
    losses = [device.run_step(0)]
    assert device.first_gradients is not None
    gradient = device.first_gradients["w"]
    return [*losses, device.run_step(1)], gradient, device.state()


def test_losses_gradients_weights_and_buffers_are_the_same_bits() -> None:
    losses, gradient, state = trained(Plain)
    Tracking.runs = 0
    again = trained(Again)
    assert Tracking.runs == 2 * 2 * MICRO_BATCHES
    assert all(torch.equal(*map(_given, pair)) for pair in zip(losses, again[0], strict=True))
    assert torch.equal(gradient, again[1])
    assert all(torch.equal(state[name], again[2][name]) for name in state)
    assert state["count"] == 2 * MICRO_BATCHES  # written once a micro-batch


def test_between_forward_and_backward_only_what_it_wrote_is_held() -> None:
    held = {}
    for cls in (Plain, Again):
        device = made(cls)
        device.stream.advance(0)
        device.forward(0, 0, x=device.batch("x", 0))  # from now on it is known what is written
        x = device.batch("x", 1)
        live = LiveBytes()
        live.ignore(device.state().values())
        with live:
            device.forward(0, 1, x=x)
            held[cls] = live.now
    loss = 4
    assert held[Again] == 4 * SIZE + 8 + loss  # mean, count
    assert held[Plain] > 4 * 32 * SIZE


def _given(loss: Tensor | None) -> Tensor:
    assert loss is not None
    return loss


# --------------------------------------------------------------------------- what it writes


class Writes(nn.Module):
    """Two names of one buffer, a frozen parameter, one that is assigned anew, and one never."""

    a: Tensor
    b: Tensor
    fresh: Tensor
    behind: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones(2))
        self._buffers["b"] = self._buffers["a"]
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("fresh", torch.ones(2))
        self.register_buffer("constant", torch.tensor(float("inf")))
        self.register_buffer("behind", torch.ones(2))
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a + self.b + self.frozen + self.fresh + self.behind
        self.a.add_(1)
        self.b.add_(10)
        with torch.no_grad():
            self.frozen.add_(1)
        self.fresh = self.fresh + 1
        self.behind.data.add_(1)  # torch keeps no count of this one
        return x * y * self.w


def test_whatever_a_forward_writes_is_read_again_as_it_was() -> None:
    module = Writes()
    twice, x = Twice(module), torch.ones(2)
    result, read = twice.first({"x": x})
    other, later = twice.first({"x": x})
    assert (result.tolist(), other.tolist()) == ([5.0, 5.0], [30.0, 30.0])
    assert set(read.copies) == set(later.copies) == {"a", "b", "frozen", "fresh", "behind"}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    again = twice.second(read)
    assert again.requires_grad
    assert again.tolist() == [5.0, 5.0]
    assert twice.second(later).tolist() == [30.0, 30.0]
    assert module._buffers["a"] is module._buffers["b"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class Sometimes(nn.Module):
    """Writes from its second run on."""

    late: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", torch.zeros(1))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs > 1:
            self.late.add_(1)
        return x * 2


def test_a_forward_that_writes_now_and_then_is_refused() -> None:
    twice = Twice(Sometimes())
    twice.first({"x": torch.ones(1)})
    with pytest.raises(MisuseError, match="late: written now"):
        twice.first({"x": torch.ones(1)})


class Force(nn.Module):
    """Takes a gradient within its forward, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)
        return force


def test_a_forward_may_take_a_gradient_of_its_own() -> None:
    twice, x = Twice(Force()), torch.full((1,), 2.0, requires_grad=True)
    result, read = twice.first({"x": x})
    assert (result.item(), result.requires_grad) == (12.0, False)
    (gradient,) = torch.autograd.grad(twice.second(read), x)
    assert gradient.item() == 12.0


class Several(nn.Module):
    """Gives a list, as an op of the user's own may."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x * 2, x * 3]


def test_a_result_may_be_a_list() -> None:
    result, _ = Twice(Several()).first({"x": torch.ones(1, requires_grad=True)})
    assert [(float(r), r.requires_grad) for r in result] == [(2.0, False), (3.0, False)]


def test_a_result_has_no_graph() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))
    result, _ = Twice(net).first({"input": torch.randn(4, 8)})
    assert result.grad_fn is None
    assert not result.requires_grad


# --------------------------------------------------------------------------- torch's pipelining


class Chain(Again):
    """As `as_pipeline_stage` reads a device class."""

    def forward_0(self, m: int) -> None:
        self.forward(0, m, x=self.batch("x", m))


class PlainChain(Chain):
    recompute: tuple[int, ...] = ()


def test_torchs_pipelining_keeps_only_arguments_too() -> None:
    found, x = [], torch.randn(32, SIZE)
    for cls in (PlainChain, Chain):
        relay = Relay((cls,), 0)
        relay.stage.load_state_dict(WEIGHTS)
        torch.manual_seed(7)  # a foreign loop has no keys: torch itself draws the same again
        losses = [relay(x=x) for _ in range(2)]
        Tracking.runs = 0
        for loss in losses:
            assert isinstance(loss, Tensor)
            loss.backward()
        runs = Tracking.runs
        gradient = relay.stage.get_parameter("w").grad
        assert gradient is not None
        found.append((losses, gradient, dict(relay.stage.named_buffers()), runs))
    plain, again = found
    assert (plain[3], again[3]) == (0, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], again[0], strict=True))
    assert torch.equal(plain[1], again[1])
    assert all(torch.equal(plain[2][name], again[2][name]) for name in plain[2])
    assert again[2]["count"] == 2
