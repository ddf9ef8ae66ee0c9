"""Emitted text without roundabout lines: folded, rolled into loops, and modules as a tree."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.emit.modules.again import made_again
from bigbrain_fx.emit.modules.tidy import tidied
from bigbrain_fx.emit.modules.tree import Tree, init_lines, put
from bigbrain_fx.frontend import capture
from tests.support import samples
from tests.support.captured import assert_same


class Pairs(nn.Module):
    """Both entries of a batch as one, whose rows are counted and halved again."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat((chosen, rejected))
        place = torch.arange(both.shape[0], device=both.device).view(2, -1)
        return (self.score(both).view(both.shape[0])[place[0]] - place[1]).mean()


def test_the_sum_of_two_sizes_is_no_op_on_tensors() -> None:
    model = Pairs()
    found = capture(model, (torch.randn(4, 6), torch.randn(4, 6)))
    sums = [op for op in found.graph.ops if op.target == "operator.add" and not op.outputs]
    assert sums
    assert tidied(found.graph).ops == found.graph.ops
    assert_same(model, found, model)


class Shifted(nn.Module):
    """A vocabulary of which this member has the first rows: nothing is taken off a token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - 0
        return (self.table[own] * self.table[tokens + 1]).mean()


def subtractions(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.target == "aten.sub.Tensor"]


def test_an_entry_of_the_batch_less_nothing_is_that_entry() -> None:
    model = Shifted()
    found = capture(model, (torch.randint(7, (4, 3)),))
    assert len(subtractions(found.graph)) == 1
    assert not subtractions(tidied(found.graph))


def test_an_entry_that_an_op_writes_in_place_is_copied() -> None:
    graph = capture(Shifted(), (torch.randint(7, (4, 3)),)).graph
    ops = tuple(
        replace(op, target="aten.add_.Tensor", mutates=("tokens",))
        if op.target == "aten.add.Tensor"
        else op
        for op in graph.ops
    )
    written = replace(graph, ops=ops)
    assert subtractions(tidied(written)) == subtractions(graph) != []


# --------------------------------------------------------------------------- values that wait


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F.gelu(h)", "again(F.gelu, h)"),
        ("self.norm(x)", "again(self.norm, x)"),
        ("self.blocks[0].norm(x)", "again(self.blocks[0].norm, x)"),
        (
            "F.layer_norm(x, (64,), self.norm.weight, None, 1e-05)",
            "again(F.layer_norm, x, (64,), self.norm.weight, None, 1e-05)",
        ),
        ("gate * up", "again(lambda gate, up: gate * up, gate, up)"),
        ("x * x", "again(lambda x: x * x, x)"),
        ("torch.cat([a, b], 1)", "again(lambda a, b: torch.cat([a, b], 1), a, b)"),
        ("x.pow(2)", "again(lambda x: x.pow(2), x)"),
        ("F.softmax(x, dim=-1)", "again(lambda x: F.softmax(x, dim=-1), x)"),
        # a loop's module is an argument: a later turn would change the name
        ("block.norm(x)", "again(lambda block, x: block.norm(x), block, x)"),
        ("x * block.scale", "again(lambda x, block: x * block.scale, x, block)"),
    ],
)
def test_expressions_are_folded(text: str, expected: str) -> None:
    found = made_again(ast.parse(text, mode="eval").body)
    assert ast.unparse(ast.fix_missing_locations(found)) == expected


# --------------------------------------------------------------------------- children of modules


def made(word: str, first: int = 0) -> str:
    """Return how children are written: one letter a child, numbered from `first`."""
    tree: Tree = {}
    for i, letter in enumerate(word):
        put(tree, f"blocks.{first + i}", ast.parse(f"{letter}()", mode="eval").body)
    _, *lines = init_lines(tree, 0)
    return " ".join(lines).partition(" = ")[2]


@pytest.mark.parametrize("word", ["ABBB", "CABAB", "AAABBB", "ABCABCAB", "AABBAABB", "ABBBCCAAA"])
@pytest.mark.parametrize("first", [0, 3])
def test_every_child_is_made_once_in_its_place(word: str, first: int) -> None:
    names = {letter: (lambda letter=letter: letter) for letter in "ABC"}

    class Nn:
        ModuleList = staticmethod(lambda items: dict(enumerate(items)))

    text = made(word, first)
    found = eval(text, {**names, "nn": Nn, "Tensors": dict})  # text of our own
    assert found == {first + i: letter for i, letter in enumerate(word)}


# --------------------------------------------------------------------------- loops


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
