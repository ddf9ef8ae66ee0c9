"""Items that repeat become loops; what a loop cannot say stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.emit.files.texts import bundle_texts
from tests.support import samples


class Mix(nn.Module):
    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sign = sign

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mixed = x + self.sign * torch.tanh(self.a(x)) * self.b(x)
        return mixed if y is None else mixed * y


class Other(Mix):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x - torch.relu(self.a(x)) * self.b(x)


class Stack(nn.Module):
    """Layers, and a function that runs them."""

    def __init__(
        self, layers: list[nn.Module], run: Callable[[nn.ModuleList, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def in_a_row(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def with_the_first(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = x.square()
    for layer in layers:
        x = layer(x, first)
    return x


def the_input_is_needed_again(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = x
    for layer in layers:
        y = layer(y)
    return x * y


def two_at_a_time(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = torch.cos(x)
    for layer in layers:
        x, y = layer(y), torch.sin(x)
    return x + y


def all_are_kept(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept = []
    for layer in layers:
        x = layer(x)
        kept.append(x)
    return torch.stack(kept).sum(0)


def text_of(layers: list[nn.Module], run: Callable[[nn.ModuleList, Tensor], Tensor]) -> str:
    """Emit a stack on one device; check that its forward is the module's, bit for bit."""
    torch.manual_seed(0)
    module, x = Stack(layers, run), torch.randn(8, 4)
    found = samples.of_module(module, {"x": x}, lambda y, _: y.square().mean())
    plan = samples.planned(found, "naive", 1, "gpipe", 1)
    text = bundle_texts(plan)["device_d0.py"]
    stage = samples.loaded(text, "device_d0").Stage0()
    stage.load_state_dict(module.state_dict())
    assert torch.equal(stage(x), module(x).square().mean())
    return text


def loops(text: str) -> list[str]:
    stage = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "Stage0")
    return [
        f"{ast.unparse(n.target)} in {ast.unparse(n.iter)}"
        for n in ast.walk(stage)
        if isinstance(n, ast.For)
    ]


ROW = "layer in self.layers"


@pytest.mark.gate("all_are_kept-expected4")
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (in_a_row, [ROW]),
        (with_the_first, [ROW]),
        (the_input_is_needed_again, [ROW]),
        (two_at_a_time, [ROW]),
        (all_are_kept, []),
    ],
)
def test_layers_in_a_row_are_a_loop_unless_each_is_read_later(
    run: Callable[[nn.ModuleList, Tensor], Tensor], expected: list[str]
) -> None:
    assert loops(text_of([Mix() for _ in range(4)], run)) == expected


@pytest.mark.nightly
def test_kinds_that_take_turns_are_a_loop_over_pairs() -> None:
    layers: list[nn.Module] = [Other() if i % 2 else Mix() for i in range(6)]
    text = text_of(layers, in_a_row)
    assert loops(text) == ["i in range(0, 6, 2)"]
    assert "nn.ModuleList(Mix() if i % 2 == 0 else Other() for i in range(6))" in text


def test_numbers_that_differ_need_no_other_loop() -> None:
    text = text_of([Mix(float(i)) for i in range(4)], in_a_row)
    assert loops(text) == ["layer in self.layers"]
    assert "Mix(3.0)" in text


@pytest.mark.nightly
def test_the_file_does_not_grow_with_the_layers() -> None:
    few, many = (text_of([Mix() for _ in range(n)], in_a_row).count("\n") for n in (3, 12))
    assert few == many
