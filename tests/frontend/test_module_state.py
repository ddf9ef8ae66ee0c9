"""Modules whose calls go by attributes, and attributes that an opaque module leaves for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.core import Graph, Stage
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing import trace
from bigbrain_fx.plan import Options, read_plan
from bigbrain_fx.plan.recompute import may_repeat
from bigbrain_fx.verification.imported_bundle import run_bundle
from tests.support.bundles import cluster
from tests.support.captured import assert_same
from tests.support.messages import refused
from tools.conformance.forms import find
from tools.conformance.forms.loop import train
from tools.conformance.matrix import imported

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


# --------------------------------------------------------------------------- further outputs


STEPS = 4


class Part(nn.Module):
    """Leaves tensors by name, in a list and in a part of its own."""

    mix: Any

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Linear(4, 4), nn.Linear(4, 2)
        self.mix.register_module("inner", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        self.aux, self.pair = weight.square().mean(), [weight[:, 0], weight.detach()]
        self.mix.inner.last = weight.sum(0)
        self.calls = getattr(self, "calls", 0) + 1
        return self.mix(x) * weight[:, :1]


class Holder(nn.Module):
    part: Any

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.part(self.first(x)).square().mean() + self.extra()
        return loss

    def extra(self) -> Tensor:
        one, other = self.part.pair
        extra: Tensor = self.part.aux + (one * other[:, 1]).mean() + self.part.mix.inner.last.prod()
        return extra


class Lengthens(nn.Module):
    """Adds to a list, which its owner empties."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.losses = nn.Linear(4, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mix(x)
        self.losses.append(found.square().mean())
        return found


class Empties(Holder):
    def extra(self) -> Tensor:
        extra: Tensor = self.part.losses[0]
        self.part.losses.clear()
        return extra


def test_attributes_that_an_opaque_module_leaves_are_read_from_its_op() -> None:
    model = Holder(Part())
    found = capture(model, (torch.randn(4, 4),), leaves=["part"])
    op = next(op for op in found.graph.ops if op.target == "leaf.part")
    assert [spec.shape for spec in op.outputs] == [("B", 4), (), ("B",), ("B", 2), (2,)]
    assert [spec.requires_grad for spec in op.outputs] == [True, True, True, False, True]
    assert_same(model, found, model)
    assert_same(model, found, model, 3)


def test_a_leaf_without_numbers_leaves_them_too() -> None:
    with torch.device("meta"):
        model = Holder(Part())
    found = capture(model, (torch.randn(4, 4),), leaves=["part"])
    op = next(op for op in found.graph.ops if op.target == "leaf.part")
    assert len(op.outputs) == 5


def test_a_list_that_a_leaf_lengthens_is_no_output_of_it() -> None:
    model = Empties(Lengthens())
    found = capture(model, (torch.randn(4, 4),), leaves=["part"])
    assert [op.target for op in found.graph.ops if op.target.startswith("leaf.")] != ["leaf.part"]
    assert_same(model, found, model)


def test_a_tensor_that_the_next_call_reads_is_no_output() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = [torch.zeros(4)]

        def forward(self, x: Tensor) -> Tensor:
            self.mean = x.mean(0).detach()
            self.last = [self.last[0] * 0 + self.mean]
            return x - self.mean

    model = nn.Sequential(nn.Linear(4, 4), Moves(), nn.Flatten(0), nn.Linear(16, 1), nn.Flatten(0))
    found = capture(model, (torch.randn(4, 4),), leaves=["1"])
    op = next(op for op in found.graph.ops if op.target == "leaf.1")
    assert len(op.outputs) == 2


@pytest.mark.gate("moe-gate-loss")
@pytest.mark.parametrize("name", ["moe-gate-loss", "moe-aux-attribute", "leaf-leaves-list"])
def test_a_bundle_trains_as_the_users_loop_on_the_whole_batch(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name.replace('-', '_')}.py"
    path.write_text(find(name).source)
    made = bb.split(path, cluster(2), tmp_path / "bundle", Options("naive", micro_batches=1))
    assert not made.plan.graph.is_opaque_step
    assert len(made.plan.stages.devices) == 2
    with imported(made.bundle, force_adamw=False) as bundle:  # later tests import theirs
        done = run_bundle(bundle, read_plan(made.bundle), STEPS, seed=0)
    losses, tensors = train(path, 1)
    assert [float(loss) for loss in done.losses] == losses
    assert all(torch.equal(tensors[n], tensor) for n, tensor in done.tensors.items())
