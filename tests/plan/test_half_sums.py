"""Parameters whose gradients stages, or replicas, add in another order than one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Stage, Stages
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import half_sums, half_sums_text, half_values, in_turn_text, turned_text


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.table(words)))
        return self.head(torch.tanh(self.mix(x)).to(self.head.weight.dtype)).float().square().mean()


def halves(model: nn.Module, autocast: str | None = None) -> tuple[Graph, Stages]:
    """Put the second use of `mix`, and what follows, into a second stage."""
    words = torch.arange(4)[:, None]
    graph = capture(model, {"words": words}, autocast=autocast).graph
    names = [op.name for op in graph.ops]
    uses = [i for i, op in enumerate(graph.ops) if "mix.weight" in op.params]
    parts = names[: uses[-1]], names[uses[-1] :]
    params = [{p for name in part for p in graph.op[name].params} for part in parts]
    stages = [Stage(i, f"d{i}", tuple(parts[i]), params=tuple(params[i])) for i in (0, 1)]
    return graph, Stages(tuple(stages), ())


def test_a_cast_in_two_stages_is_said_and_one_beside_a_plain_use_is_not() -> None:
    graph, stages = halves(Twice(), "bfloat16")
    assert half_sums(graph, stages) == ("mix.weight", "mix.bias")  # the table is looked up as it is
    (said,) = half_sums_text(graph, stages)
    assert said.startswith("mix.weight, mix.bias: several stages add up gradients that one process")


@pytest.mark.nightly
def test_float32_has_none_and_sixteen_bits_have_what_stages_share() -> None:
    assert half_sums(*halves(Twice())) == ()
    assert half_sums_text(*halves(Twice())) == ()
    assert half_sums(*halves(Twice().bfloat16())) == ("table.weight", "mix.weight", "mix.bias")


class Branches(nn.Module):
    """Reads its first value three times: by `b`, by `n`, and last by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.n, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.i(x)
        k = self.b(h)
        return (h * k + self.n(h)).float().square().mean()


def branches(first: tuple[str, ...], model: nn.Module) -> tuple[Graph, Stages]:
    x = torch.randn(4, 4, dtype=next(model.parameters()).dtype)
    graph = capture(model, {"x": x}).graph
    one = [op.name for op in graph.ops if op.params and op.params[0].startswith(first)]
    rest = [op.name for op in graph.ops if op.name not in one]
    return graph, Stages((Stage(0, "d0", tuple(one)), Stage(1, "d1", tuple(rest))), ())


def test_a_value_that_stages_read_in_turn_is_said() -> None:
    """In one process (product + n) + b; in the bundle (product + b) + n."""
    graph, stages = branches(("i.", "n."), Branches().bfloat16())
    (value,) = half_values(graph, stages)
    assert graph.op[value].params == ("i.weight", "i.bias")
    (said,) = half_sums_text(graph, stages)
    assert "test_half_sums.py:" in said
    assert "stages that read it in turn add up its gradient" in said


def test_of_other_types_verify_says_it_and_split_does_not() -> None:
    graph, stages = branches(("i.", "n."), Branches())
    assert half_sums_text(graph, stages) == ()
    said = in_turn_text(graph, stages)
    assert "test_half_sums.py:" in said
    assert said.endswith("stages that read it in turn add up its gradient in another order")
    assert in_turn_text(*branches(("i.",), Branches())) == ""


@pytest.mark.nightly
def test_a_value_that_stages_read_one_after_another_is_not() -> None:
    assert half_values(*branches(("i.", "b."), Branches().bfloat16())) == ()
    assert half_values(*branches(("i.",), Branches().bfloat16())) == ()
    assert half_values(*branches(("i.", "n."), Branches())) == ()


def test_replicas_add_all_gradients_of_sixteen_bits_otherwise() -> None:
    graph, _ = halves(Twice().bfloat16())
    whole = Stage(0, "d0", tuple(op.name for op in graph.ops))
    trained = ("table.weight", "mix.weight", "mix.bias")
    assert half_sums(graph, Stages((whole,), ())) == ()
    assert half_sums(graph, Stages((whole,), (), micros=((0,), (1,)))) == trained


def test_weights_that_lie_otherwise_are_said() -> None:
    """Kernels for images look at strides of size 1, too: they are turned, or not, as a whole."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, groups=3))
    model.append(nn.Flatten())
    assert turned(model) == ()
    assert turned(model.to(memory_format=torch.channels_last)) == ()  # type: ignore[call-overload]
    model[0].to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    (said,) = turned(model)
    assert said.startswith("1.weight, 2.weight: the model holds them otherwise")


def turned(model: nn.Module) -> tuple[str, ...]:
    """Return what is said of a model on one device."""
    graph = capture(model, {"input": torch.randn(2, 2, 8, 8)}).graph
    names = tuple(op.name for op in graph.ops)
    whole = Stage(0, "d0", names, params=tuple(p.name for p in graph.params))
    return turned_text(graph, Stages((whole,), ()))
