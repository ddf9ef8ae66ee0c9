"""Models that keep something from call to call: refused where a later call goes by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing import check
from bigbrain_fx.frontend.tracing.state import hidden_state
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from bigbrain_fx.frontend.tracing.state.counters import decision, numbers_of
from tests.support.captured import assert_same

Middle = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and something of a case's own between them."""

    calls = 0
    kept: Any = None

    def __init__(self, middle: Middle = lambda _net, h: h) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.middle = (middle,)
        self.table, self.dice = [0.0], random.Random(0)
        self.ema = torch.zeros(8)

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle[0](self, torch.tanh(self.up(x)))).square().mean()


def batch() -> tuple[Tensor]:
    return (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),)


def hidden(net: Net, h: Tensor) -> Tensor:
    """Truncated backpropagation through time."""
    h = h if net.kept is None else h + net.kept
    net.kept = h.detach()
    return h


def of_class(net: Net, h: Tensor) -> Tensor:
    Net.calls += 1
    return h / Net.calls


AT_ONCE: dict[str, Middle] = {
    "hidden": hidden,
    "of the class": of_class,
    "dice of its own": lambda net, h: h * net.dice.random(),
}


@pytest.mark.gate("hidden", "dice of its own", "of the class")
@pytest.mark.parametrize("middle", AT_ONCE.values(), ids=AT_ONCE)
def test_state_that_the_first_calls_go_by_is_refused(middle: Middle) -> None:
    model = nn.Sequential(Net(middle))
    before = Attributes.of(model, numbers=False)
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(CaptureError) as caught:
        capture(model, batch())
    assert caught.value.code == "BX0160g"
    assert (caught.value.at or "").startswith(Path(__file__).name)
    names = before.moved(Attributes.of(model, numbers=False))
    assert [name for name in names if name != "0.dice"] == []
    assert Net.calls == 0
    assert all(map(torch.equal, model.parameters(), weights))


# --------------------------------------------------------------------------- let be


def at_first_use(net: Net, h: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = torch.arange(float(h.shape[1])).cos()
    return h * net.kept


def for_a_look(net: Net, h: Tensor) -> Tensor:
    net.table.append(float(net.count()))
    net.kept = h.square().mean()
    return h


@pytest.mark.nightly
@pytest.mark.parametrize("middle", [at_first_use, for_a_look])
def test_attributes_without_effect_are_left_alone(middle: Middle) -> None:
    model = Net(middle)
    names = set(vars(model))
    found = capture(model, batch())
    assert (found.graph.static_batch, found.warnings) == (None, ())
    assert set(vars(model)) == names  # nothing of the trace stays behind
    assert (model.calls, model.table) == (0, [0.0])
    assert_same(model, found, model)


# --------------------------------------------------------------------------- later


class Counting(nn.Module):
    """Counts calls in an attribute."""

    def __init__(self, decides: Callable[[int], float], *, in_list: bool = False) -> None:
        super().__init__()
        self.decides, self.calls = (decides,), [0] if in_list else 0

    def run(self) -> tuple[Tensor, ...]:
        if isinstance(self.calls, list):
            self.calls[0] += 1
            return (torch.tensor(self.decides[0](self.calls[0])),)
        self.calls += 1
        return (torch.tensor(self.decides[0](self.calls)),)

    def decided(self) -> int | None:
        found = decision(self.run, lambda: numbers_of(self, None))
        return None if found is None else found.runs


@pytest.mark.parametrize("in_list", [False, True])
def test_a_count_is_found_where_it_decides_late_and_let_be_where_it_does_not(in_list: bool) -> None:
    late = Counting(lambda calls: float(calls > 150), in_list=in_list).decided()
    assert late == 200
    assert Counting(lambda calls: 1.0, in_list=in_list).decided() is None


@pytest.mark.parametrize("period", [7, 100, 512, 3_000])
@pytest.mark.parametrize("before", [0, 1])
def test_effects_of_every_nth_call_are_met(period: int, before: int) -> None:
    assert Counting(lambda now: float((now + before) % period == 0)).decided() is not None


# --------------------------------------------------------------------------- of a large model


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model is run without numbers."""
    monkeypatch.setattr(hidden_state, "is_costly", lambda *_: True)


def warming(net: Net, h: Tensor) -> Tensor:
    return h * (0.1 if net.count() <= 1_000 else 1.0)


def at_every_hundredth(net: Net, h: Tensor) -> Tensor:
    return h.detach() if net.count() % 100 == 0 else h


def logging(net: Net, h: Tensor) -> Tensor:
    if net.count() % 100 == 0:
        net.table.append(float(h.mean()))
    return h


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("middle", [warming, at_every_hundredth])
def test_a_counter_of_a_large_model_is_refused_where_it_decides(middle: Middle) -> None:
    model = Net(middle)
    with pytest.raises(CaptureError) as caught:
        capture(model, batch())
    assert caught.value.family == "BX0160"
    assert model.calls == 0


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("middle", [at_first_use, for_a_look, logging])
def test_attributes_of_a_large_model_without_effect_are_left_alone(middle: Middle) -> None:
    model = Net(middle)
    assert capture(model, batch()).graph.static_batch is None
    assert (model.calls, model.table) == (0, [0.0])


# --------------------------------------------------------------------------- .data


class Momentum(nn.Module):
    """A frozen twin that follows in forward."""

    def __init__(self, follow: Callable[[nn.Linear, nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8).requires_grad_(False)
        self.follow = (follow,)

    def forward(self, x: Tensor) -> Tensor:
        return self.follow[0](self.query, self.key, x)


def by_data(query: nn.Linear, key: nn.Linear, x: Tensor) -> Tensor:
    key.weight.data = key.weight.data * 0.9 + query.weight.data * 0.1
    return (query(x) * key(x)).mean()


def test_data_of_a_model_that_is_not_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECK_FLOPS", 0)
    with pytest.raises(CaptureError) as caught:
        capture(Momentum(by_data), batch())
    assert caught.value.code == "BX0181b"
