"""Opaque lines of the model's own forward, with modules that are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import Captured, capture, leaf_paths
from tests.support.captured import assert_same
from tests.support.messages import refused


class Picked(nn.Module):
    """Picks rows by their labels, after its modules; the head is the embedding's weight."""

    weight_of: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(5, 8))
        self.lift = nn.Linear(8, 8)
        self.register_buffer("weight_of", torch.rand(11) + 0.5)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.lift(self.embed(tokens) + self.place)
        kept = labels >= 0
        rows = hidden[kept]
        if rows.shape[0] == 0:
            return {"loss": hidden.sum() * 0.0, "count": kept.sum()}
        logits = rows @ self.embed.weight.T
        loss = F.cross_entropy(logits, labels[kept], weight=self.weight_of)
        return {"loss": loss, "count": kept.sum()}


def picked_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, 11, (6, 5))
    labels[:, 3:] = -100
    return {"tokens": torch.randint(0, 11, (6, 5)), "labels": labels}


def lines_of(found: Captured) -> Any:
    (op,) = (op for op in found.graph.ops if op.target.startswith("leaf."))
    return op


def test_the_lines_are_one_op_after_the_modules() -> None:
    model = Picked()
    found = capture(model, picked_batch())
    op = lines_of(found)
    assert op.target == "leaf.forward_5_9"
    assert op.refs == ("linear", "ge", "labels")  # the tokens are not read
    assert set(op.params) == {"embed.weight", "weight_of"}
    assert leaf_paths(found.graph) == ("forward_5_9",)
    assert found.graph.static_batch is None
    assert any("in forward of Picked" in said for said in found.warnings)

    def eager(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(tokens, labels)["loss"]

    assert_same(model, found, eager)
    assert_same(model, found, eager, 3)


class Wrapper(nn.Module):
    """Holds the whole model; its own part is small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Picked()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return 2.0 * self.inner(tokens, labels)["loss"]


def test_a_wrapped_model_is_not_kept_on_one_device() -> None:
    model = Wrapper()
    found = capture(model, picked_batch())
    assert lines_of(found).target == "leaf.inner.forward_5_9"
    assert "inner.embed.weight" in lines_of(found).params
    assert_same(model, found, model)


class Odd(nn.Module):
    """A forward whose last line no trace holds; `how` says what the other lines do."""

    count: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lift = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.how, self.table = how, torch.rand(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "selected before":
            x = x[x[:, 0] > 0]
        hidden = self.lift(x)
        if self.how == "written":
            hidden += 1.0
        if self.how == "counted":
            self.count += 1.0
        if self.how == "read after a module wrote":
            hidden = self.norm(hidden) * self.norm.running_mean
        if self.how == "drawn":
            hidden = F.dropout(hidden)
        if self.how == "plain tensor":
            hidden = hidden * self.table
        return hidden[hidden[:, 0] > 0].square().mean()


@pytest.mark.gate("written", "drawn", "read after a module wrote")
@pytest.mark.parametrize(
    "how", ["written", "counted", "drawn", "plain tensor", "read after a module wrote"]
)
def test_the_other_lines_read_and_write_as_in_the_model(how: str) -> None:
    torch.manual_seed(2)
    model = Odd(how)
    found = capture(model, {"x": torch.randn(6, 8)})
    assert lines_of(found).target.startswith("leaf.forward_")
    assert_same(model, found, model)


def test_lines_in_which_all_modules_are_are_refused() -> None:
    with refused("BX0130b", BigBrainError) as caught:
        capture(Odd("selected before"), {"x": torch.randn(6, 8)})
    assert (caught.value.at or "").startswith("test_kept_lines.py:")


class Chosen(nn.Linear):
    def forward(self, input: Tensor, positive: bool = True) -> Tensor:
        return super().forward(input) if positive else -super().forward(input)


class Between(nn.Module):
    """A forward with lines between its modules that no trace holds; `how` says what they do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), Chosen(8, 8)
        self.how, self.calls, self.said = how, 0, ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if float(hidden.detach().abs().max()) > 0.1:
            hidden = hidden * 2
        self.said = f"{float(hidden.detach().max()):.2f}"
        if self.how == "counts":
            self.calls += 1
        if self.how == "chooses":
            hidden = self.b(hidden, float(hidden.detach().sum()) > -1e9)
        if self.how == "freezes":
            self.b.requires_grad_(False)
        found: Tensor = (self.b(hidden) + hidden).square().mean()
        if self.how == "freezes":
            self.b.requires_grad_(True)
        return found


@pytest.mark.gate("counts")
@pytest.mark.parametrize("how", ["plain", "counts"])
def test_lines_between_modules_are_opaque_and_the_modules_are_not(how: str) -> None:
    model = Between(how)
    found = capture(model, {"x": torch.randn(6, 8)})
    assert any(op.target.startswith("leaf.forward_") for op in found.graph.ops)
    assert sum(op.target == "aten.linear.default" for op in found.graph.ops) == 2
    assert found.graph.static_batch is None
    assert_same(model, found, model)
    assert_same(model, found, model, 3)


@pytest.mark.gate("freezes")
@pytest.mark.parametrize("how", ["freezes", "chooses"])
def test_lines_that_leave_something_for_modules_are_refused(how: str) -> None:
    with refused("BX0130d", BigBrainError):
        capture(Between(how), {"x": torch.randn(6, 8)})


class Deep(nn.Module):
    """A loss by data that calls the head once more, as DETR's does for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        last = self.head(h).mean()
        picked = h[h.sum(1) > float(h.detach().mean())]
        return last + self.head(torch.cat([picked, h])[: h.shape[0]]).square().mean()


def test_a_module_that_lines_and_others_call_is_opaque_too() -> None:
    model = Deep()
    found = capture(model, {"x": torch.randn(6, 8)})
    targets = [op.target for op in found.graph.ops if op.target.startswith("leaf.")]
    assert "leaf.head" in targets
    assert any(target.startswith("leaf.forward_") for target in targets)
    assert_same(model, found, model)
    assert_same(model, found, model, 3)


@pytest.mark.nightly
def test_the_class_and_its_calls_are_as_before() -> None:
    model, call = Picked(), nn.Module.__call__
    capture(model, picked_batch())
    assert type(model) is Picked
    assert nn.Module.__call__ is call
    assert "forward" not in vars(model)
