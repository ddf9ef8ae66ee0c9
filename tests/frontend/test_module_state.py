"""Modules whose calls go by what they have left in attributes, as capture sees them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Stage
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing import trace
from bigbrain_fx.plan.recompute import may_repeat
from tests.support.messages import refused

BATCH = {"x": torch.randn(8, 6), "y": torch.randn(8, 6)}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.calls = nn.Linear(6, 6), 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h + self.f(h) * min(1.0, self.calls / 4)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.length = nn.Linear(6, 6), 0

    def forward(self, h: Tensor) -> Tensor:
        self.length = max(self.length, h.shape[1])
        return self.f(h) / max(6, self.length)


class Net(nn.Module):
    def __init__(self, inner: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.a, self.inner, self.b, self.times = nn.Linear(6, 6), inner, nn.Linear(6, 6), calls

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        for _ in range(self.times):
            h = self.inner(h)
        out: Tensor = self.b(h)
        return out


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def graph_of(model: nn.Module, *leaves: str) -> Graph:
    torch.manual_seed(0)
    return capture(model, BATCH, loss, leaves=leaves).graph


def states(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {op.target: op.state for op in graph.ops if op.target.startswith("leaf.")}


def test_the_module_alone_is_opaque_and_is_as_it_was() -> None:
    model = Net(Counting())
    assert states(graph_of(model)) == {"leaf.inner": ("calls",)}
    assert model.inner.calls == 0


def test_only_where_it_may_be_opaque() -> None:
    for how in ({"strict": True}, {"training": False}):
        with refused("BX0160g", CaptureError):
            capture(Net(Counting()), BATCH, loss, **how)  # type: ignore[arg-type]  # of bools
    found = capture(Net(Counting()), BATCH, loss, strict=True, leaves=("inner",))
    assert states(found.graph) == {"leaf.inner": ("calls",)}


def test_state_in_a_part_of_an_opaque_module_is_its_own() -> None:
    inner = nn.Sequential(Counting(), nn.ReLU())
    assert states(graph_of(Net(inner), "inner")) == {"leaf.inner": ("0.calls",)}


def test_a_stage_with_such_a_module_does_not_run_again() -> None:
    for inner, expected in ((Counting(), False), (Cached(), True)):
        graph = graph_of(Net(inner))
        stage = Stage(0, "d0", tuple(op.name for op in graph.ops), (), (), ())
        assert may_repeat(graph, stage) is expected


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no model be run a million calls on: nobody knows then what its calls go by."""
    monkeypatch.setattr(trace, "modules_with_state", lambda *_: None)


@pytest.mark.usefixtures("costly")
def test_of_a_large_model_all_that_moves_counts_but_caches() -> None:
    assert states(graph_of(Net(Counting()), "Counting")) == {"leaf.inner": ("calls",)}
    assert states(graph_of(Net(Cached()), "Cached")) == {"leaf.inner": ()}


@pytest.mark.usefixtures("costly")
def test_a_module_with_state_that_is_called_twice_is_refused() -> None:
    with refused("BX0160j", CaptureError):
        graph_of(Net(Counting(), 2), "Counting")
