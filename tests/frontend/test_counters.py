"""What counts is found wherever it is kept, and moved on until it decides something."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.counters import decision
from tests.support.messages import refused

LOCAL = threading.local()
LOCAL.calls = 0
COUNTS = {"calls": 0}
Calls = Callable[[], int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    calls: int = 0


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


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


def _in_slots() -> Calls:
    held = Slots()

    def counted() -> int:
        held.calls += 1
        return held.calls

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
    *(_in_closure, _in_default, _in_slots, _in_list, _in_array, _in_tensor),
    *(_in_thread, _in_file, _in_pair, _in_frozen),
)


def found(calls: Calls, decides: Callable[[int], float]) -> int | None:
    def run() -> tuple[Tensor, ...]:
        return (torch.tensor(decides(calls())),)

    made = decision(run, run, (run,))
    return None if made is None else made.runs


@pytest.mark.gate("_in_frozen", "_in_list", "_in_pair")
@pytest.mark.parametrize("place", PLACES)
def test_a_count_is_found_where_it_decides_late_and_let_be_where_it_does_not(
    place: Callable[[], Calls],
) -> None:
    late = found(place(), lambda calls: float(calls > 150))
    assert late is not None
    assert 100 < late <= 1_000
    assert found(place(), lambda calls: 1.0) is None


@pytest.mark.parametrize("period", [7, 100, 512, 3_000])
@pytest.mark.parametrize("before", [0, 1])
def test_what_happens_at_each_so_many_th_call_is_met(period: int, before: int) -> None:
    calls = _in_closure()
    assert found(calls, lambda now: float((now + before) % period == 0)) is not None


def test_a_run_that_is_unlike_at_once_is_for_others_to_tell() -> None:
    assert found(_in_closure(), float) is None


class Agent(nn.Module):
    """A deep Q network whose target is copied at every hundredth call, after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x).amax(1, keepdim=True)
        got = self.online(x)
        self.steps += 1
        if self.steps % 100 == 0:
            self.target.load_state_dict(self.online.state_dict())
        return (got - wanted).square().mean()


class Logging(nn.Module):
    """Counts in every way, and goes by none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps, self.seen = nn.Linear(4, 2), 0, collections.Counter[str]()
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen["calls"] += 1
        self.history.append(x.shape[0])
        return self.linear(x).square().mean()


def test_weights_that_a_late_call_copies_are_a_reason() -> None:
    with refused("BX0160i", CaptureError, vary=(r"\d+ calls",)) as caught:
        capture(Agent(), (torch.randn(8, 4),))
    assert (caught.value.at or "").startswith("test_counters.py:")


@pytest.mark.nightly
def test_what_is_counted_for_a_look_alone_is_let_be_and_left_as_it_was() -> None:
    model = Logging()
    capture(model, (torch.randn(8, 4),))
    assert (model.steps, model.history, dict(model.seen)) == (0, [], {})
