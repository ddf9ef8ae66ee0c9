"""Objects as statements that make them anew: equal ones, shared as they were, without weights."""

from __future__ import annotations

import ast
import collections
import enum
import functools
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigbrain_fx.bundles.literals import LiteralError
from bigbrain_fx.bundles.object_text import LARGEST_TENSOR, ObjectText, skeleton


class Colour(enum.Enum):
    RED = 1


@dataclass
class Meter:
    seen: list[int] = field(default_factory=list)
    rate: float = 0.5


class Slots:
    __slots__ = ("calls", "meter")

    def __init__(self) -> None:
        self.calls, self.meter = 3, Meter([1])


class Gate(nn.Module):
    """Holds its weight twice, a counter, a buffer outside of its state and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.also = self.inner
        self.calls, self.notes = 7, {"names": ["a"]}
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_forward_hook(double)


def double(_module: object, _given: object, found: torch.Tensor) -> torch.Tensor:
    return 2 * found


def again(value: object, loaded: tuple[torch.Tensor, ...] = ()) -> Any:
    """Write what makes a value, run it, and return what it makes."""
    names: dict[str, object] = {}

    def define(part: Any) -> str:
        name = str(part.__name__).rpartition(".")[2]
        assert names.setdefault(name, part) is part
        return name

    made = ObjectText.of(value, define, loaded)
    last = ast.Assign([ast.Name("made", ast.Store())], made.value)
    tree = ast.Module([*made.statements, last], [])
    exec(compile(ast.unparse(ast.fix_missing_locations(tree)), "text", "exec"), names)
    return names["made"]


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1, b=[2]),
        collections.Counter("abca"),
        collections.deque([1, 2], 3),
        collections.defaultdict(list, {1: [2]}),
        Colour.RED,
        Meter([1, 2], 0.25),
        torch.bfloat16,
        torch.device("cpu"),
        torch.Size((1, 2)),
        frozenset({1}),
        (float("inf"), {"x": {1, 2}}, [], ()),
    ],
    ids=repr,
)
def test_an_object_is_made_anew(value: object) -> None:
    found = again(value)
    assert found == value
    assert type(found) is type(value)


def test_slots_partials_and_generators_have_their_state() -> None:
    assert again(Slots()).meter == Meter([1])
    assert again(functools.partial(int, base=2))("11") == 3
    numbers = random.Random(3)
    numbers.random()
    assert again(numbers).random() == numbers.random()
    drawn = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(2, generator=again(drawn)), torch.rand(2, generator=drawn))
    assert torch.equal(again(drawn).get_state(), drawn.get_state())  # has drawn


def test_variables_hide_no_name_of_python() -> None:
    meter = Meter()
    found = again({"lambda": [meter], "set": [meter], "bytearray": meter, "also": {1, 2}})
    assert found == {"lambda": [meter], "set": [meter], "bytearray": meter, "also": {1, 2}}


def test_methods_are_those_of_their_object() -> None:
    meter = Meter([1])
    found, add, built_in = again([meter, meter.seen.append, F.gelu])
    add(2)
    assert found.seen == [1, 2]
    assert built_in is F.gelu
    assert again(dict.fromkeys)("a") == {"a": None}


def test_objects_and_lists_stay_shared_and_may_refer_to_themselves() -> None:
    meter = Meter()
    first, second, of = again([meter, meter, meter.seen])
    assert first is second
    assert first.seen is of
    meter.rate = meter  # type: ignore[assignment]
    found = again(meter)
    assert found.rate is found


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [(), (2, 3), (20, 5)])
def test_a_plain_tensor_comes_with_its_numbers(kind: torch.dtype, size: tuple[int, ...]) -> None:
    value = (torch.randn(size) * 3).to(kind)
    with torch.device("meta"):
        found = again(value)
    assert torch.equal(found, value)
    assert found.dtype is kind


def test_a_module_comes_without_its_weights() -> None:
    gate = Gate().eval()
    gate.inner.weight.requires_grad_(False)
    found = again(gate, (*gate.parameters(), *gate.buffers()))
    found.inner.load_state_dict(gate.inner.state_dict())
    found.mask = gate.mask
    assert found.also is found.inner
    assert not found.inner.weight.requires_grad
    assert (found.calls, found.notes, found.training) == (7, {"names": ["a"]}, False)
    assert [*found.state_dict()] == [*gate.state_dict()]
    x = torch.randn(3, 2)
    assert torch.equal(double(0, 0, gate.inner(x)), double(0, 0, found.inner(x)))
    assert [*found._forward_hooks.values()] == [double]


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(3, 4, 2), lambda: nn.MultiheadAttention(4, 2), nn.BatchNorm1d]
)
def test_layers_of_torch_compute_the_same(make: Any) -> None:
    layer = make(4) if make is nn.BatchNorm1d else make()
    found = again(layer, (*layer.parameters(), *layer.buffers()))
    found.load_state_dict(layer.state_dict())
    width = 3 if isinstance(layer, nn.LSTM) else 4
    given = [torch.randn(5, width)] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
    want, have = layer(*given), found(*given)
    assert torch.equal(*(each[0] if isinstance(each, tuple) else each for each in (want, have)))


def test_a_parametrized_layer_computes_the_same() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    found = again(nn.Sequential(layer), (*layer.parameters(), *layer.buffers()))[0]
    found.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(found(x), layer(x))
    assert [*found.state_dict()] == [*layer.state_dict()]


def _large() -> object:
    return torch.zeros(LARGEST_TENSOR + 1)


def _looped() -> object:
    found: list[object] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        lambda: (number for number in [1]),
        _large,
        _looped,
        lambda: nn.Linear(2, 2),  # nobody loads its weights
        lambda: torch.ones(2, requires_grad=True) * 2,
        lambda: [*range(200_000)],
    ],
)
def test_no_text_makes_some_values(make: Any) -> None:
    with pytest.raises(LiteralError):
        again(make())


def test_a_view_of_a_weight_is_not_written_as_numbers() -> None:
    gate = Gate()
    gate.notes = {"view": gate.inner.weight.data}  # type: ignore[dict-item]
    with pytest.raises(LiteralError):
        again(gate, (*gate.parameters(), *gate.buffers()))


def test_a_skeleton_has_the_modules_at_their_places() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), Gate()))
    found = skeleton(model, ["1.1", "1.1.inner"])
    assert found.get_submodule("1.1") is model[1][1]  # type: ignore[index]
    assert len([*found.modules()]) == 4
    assert skeleton(model, ["", "1.1"]) is model
