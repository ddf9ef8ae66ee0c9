"""Models that keep something from call to call: refused where a later call goes by it."""

from __future__ import annotations

import dataclasses
import random
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing import check
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from bigbrain_fx.frontend.tracing.state.counters import decision
from tests.support.captured import assert_same

LOCAL = threading.local()
LOCAL.calls = 0
COUNTS = {"calls": 0}
Calls = Callable[[], int]
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


def slots() -> Calls:
    at = type("Progress", (), {"__slots__": ("calls",)})()
    at.calls = 0

    def counted() -> int:
        at.calls += 1
        return int(at.calls)

    return counted


AT_ONCE: dict[str, Middle] = {
    "hidden": hidden,
    "of the class": of_class,
    "dice of its own": lambda net, h: h * net.dice.random(),
    "in slots": (lambda count: lambda _net, h: h * min(1.0, count() / 3))(slots()),
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
def test_what_changes_nothing_is_let_be(middle: Middle) -> None:
    model = Net(middle)
    names = set(vars(model))
    found = capture(model, batch())
    assert (found.graph.static_batch, found.warnings) == (None, ())
    assert set(vars(model)) == names  # nothing of the trace stays behind
    assert (model.calls, model.table) == (0, [0.0])
    assert_same(model, found, model)


# --------------------------------------------------------------------------- later


@dataclasses.dataclass(frozen=True)
class Frozen:
    calls: int = 0


def _in_closure() -> Calls:
    calls = 0

    def counted() -> int:
        nonlocal calls
        calls += 1
        return calls

    return counted


def _in_default() -> Calls:
    def counted(held: list[int] = [0]) -> int:  # noqa: B006  # as users write it
        held[0] += 1
        return held[0]

    return counted


def _in_list() -> Calls:
    held: list[float] = []

    def counted() -> int:
        held.append(0.5)
        return len(held)

    return counted


def _in_array() -> Calls:
    held = np.zeros(1, np.int64)

    def counted() -> int:
        held[0] += 1
        return int(held[0])

    return counted


def _in_array_of_python() -> Calls:
    held = array("q", [0])

    def counted() -> int:
        held[0] += 1
        return held[0]

    return counted


def _in_tensor() -> Calls:
    held = torch.zeros(())

    def counted() -> int:
        held.add_(1)
        return int(held)

    return counted


def _in_thread() -> Calls:
    def counted() -> int:
        LOCAL.calls += 1
        return int(LOCAL.calls)

    return counted


def _in_file() -> Calls:
    def counted() -> int:
        COUNTS["calls"] += 1
        return COUNTS["calls"]

    return counted


def _in_pair() -> Calls:
    held = SimpleNamespace(seen=(0, "rows"))

    def counted() -> int:
        held.seen = (held.seen[0] + 1, "rows")
        return held.seen[0]

    return counted


def _in_frozen() -> Calls:
    held = SimpleNamespace(state=Frozen())

    def counted() -> int:
        held.state = dataclasses.replace(held.state, calls=held.state.calls + 1)
        return held.state.calls

    return counted


PLACES = (
    *(_in_closure, _in_default, slots, _in_list, _in_array, _in_tensor),
    *(_in_thread, _in_file, _in_pair, _in_frozen, _in_array_of_python),
)


def decided(calls: Calls, decides: Callable[[int], float]) -> int | None:
    def run() -> tuple[Tensor, ...]:
        return (torch.tensor(decides(calls())),)

    found = decision(run, (run,))
    return None if found is None else found.runs


@pytest.mark.gate("_in_frozen", "_in_list", "_in_pair")
@pytest.mark.parametrize("place", PLACES)
def test_a_count_is_found_where_it_decides_late_and_let_be_where_it_does_not(
    place: Callable[[], Calls],
) -> None:
    late = decided(place(), lambda calls: float(calls > 150))
    assert late is not None
    assert 100 < late <= 1_000
    assert decided(place(), lambda calls: 1.0) is None


@pytest.mark.parametrize("period", [7, 100, 512, 3_000])
@pytest.mark.parametrize("before", [0, 1])
def test_what_happens_at_each_so_many_th_call_is_met(period: int, before: int) -> None:
    assert decided(_in_closure(), lambda now: float((now + before) % period == 0)) is not None


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
