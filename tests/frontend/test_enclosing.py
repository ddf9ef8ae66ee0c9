"""Code that no trace holds: the module around it, or lines that read a number, are opaque."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import Captured, capture, leaf_paths
from bigbrain_fx.frontend.tracing.opaque.enclosing_module import KeptWhole, enclosing
from tests.support.captured import assert_same, run


class Hit(nn.Module):
    """Runs the experts that were hit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        best = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Top(nn.Module):
    """Returns as many rows as data say."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lift(x[x[:, 0] > 0])


class Mean(nn.Module):
    """Makes one row again of what `Top` gives."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x).sum(0)


class Throwing(nn.Module):
    """Reads a number, and throws Python's dice."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lift(x) * float(x.max().item()) * random.uniform(1, 2)


class Net(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(nn.Linear(6, 6), *parts, nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x).square().mean()


def captured(model: nn.Module, **options: Any) -> Captured:
    return capture(
        model, (torch.randn(8, 6, generator=torch.Generator().manual_seed(1)),), **options
    )


@pytest.mark.nightly
def test_layers_of_one_class_are_kept_whole_together() -> None:
    model = Net(Hit(), nn.Tanh(), Hit())
    found = captured(model)
    assert leaf_paths(found.graph) == ("parts.1", "parts.3")
    assert_same(model, found, model)
    assert found.graph.static_batch is None
    (said,) = found.warnings
    assert said.startswith("opaque, on one device: Hit (2 modules, 84% of the parameters)")
    assert "if rows.numel():" in said


def test_a_strict_capture_keeps_no_module_whole() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(Net(Hit(), nn.Tanh()), strict=True)
    assert "rows.numel" in str(caught.value.notes) + str(caught.value.what)


def test_a_part_without_a_result_shape_makes_its_parent_opaque() -> None:
    model = Net(Mean(Top()))
    found = captured(model)
    assert leaf_paths(found.graph) == ("parts.1",)
    assert_same(model, found, model)


def test_parts_that_were_opaque_once_are_not_tried_again() -> None:
    """What is inside an opaque module is refused as that module is: the one around it is next."""
    model = Net(nn.Sequential(Hit(), nn.Linear(6, 6)), nn.Linear(6, 6))
    tried = list[KeptWhole]()

    def attempt(whole: KeptWhole) -> Captured:
        tried.append(whole)
        error = CaptureError("data decide", code="BX0130c")
        error.inside = "parts.1.0.experts.0" if len(tried) % 2 else "parts.1.0"
        raise error

    with pytest.raises(CaptureError):
        enclosing(model, (), attempt)
    assert len(tried) == len(set(tried)) < 9, tried


def test_the_model_itself_is_not_kept_whole() -> None:
    class Whole(Top):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    with pytest.raises(CaptureError, match=r"data decide|depends on data"):
        captured(Whole())


def test_a_module_that_draws_with_python_is_opaque_and_random() -> None:
    for leaves in ([], ["Throwing"]):
        graph = captured(Net(Throwing()), leaves=leaves).graph
        assert [op.random for op in graph.ops if op.target.startswith("leaf.")] == [True]


class Seeded(nn.Module):
    """Seeds torch at each call: a trace draws on."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.lift(x) + torch.randn(6)


def test_a_part_that_computes_something_else_than_its_trace_is_kept_whole() -> None:
    model = Net(Seeded(), nn.Linear(6, 6))
    found = captured(model)
    assert leaf_paths(found.graph) == ("parts.1",)
    assert_same(model, found, model)
    with pytest.raises(CaptureError) as caught:  # what the others draw goes by that seed
        captured(Net(Seeded(), nn.Linear(6, 6), nn.Dropout(0.5)))
    assert caught.value.code == "BX0201"


class Matcher(nn.Module):
    """Made anew wherever it is called: no part of any model."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        return rows.sum() * rows.shape[0] if rows.shape[0] > 2 else rows.sum()


class Matching(nn.Module):
    """Computes by a module that a function makes, and then by one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scale = Matcher()(x)
        return self.lift(x * scale).sum()


def test_only_a_part_of_the_model_is_named_as_one_to_keep_whole() -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError) as caught:
        capture(Matching(), {"x": torch.randn(8, 6)}, strict=True)
    assert "--opaque with its class" in str(caught.value.help)


def test_lines_before_a_module_are_kept_whole() -> None:
    torch.manual_seed(0)
    model = Matching()
    found = capture(model, {"x": torch.randn(8, 6)})
    assert any(op.target.startswith("leaf.forward_") for op in found.graph.ops)
    assert any(op.target == "aten.linear.default" for op in found.graph.ops)
    assert_same(model, found, model)


# ------------------------------------------------------------ lines that read a number


class Checked(nn.Module):
    """Looks at lengths as XLM does, and at a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.linear(x)
        assert lengths.max().item() <= h.shape[1]
        if h.abs().max().item() > 100.1:
            raise ValueError("too large")
        return (h * (torch.arange(4) < lengths[:, None])).square().mean()


def test_lines_that_check_numbers_are_opaque_and_raise_later() -> None:
    model = Checked()
    found = capture(model, (torch.randn(4, 4), torch.tensor([1, 2, 3, 4])))
    assert found.graph.static_batch is None
    assert_same(model, found, model)
    assert any(op.target.startswith("leaf.forward_") for op in found.graph.ops)
    with pytest.raises(AssertionError):
        run(found, {"x": torch.randn(4, 4), "lengths": torch.tensor([1, 2, 3, 5])})
