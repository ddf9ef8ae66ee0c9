"""Identifiers of a bundle are Python names that hide nothing, after the author's own names."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from bigbrain_fx.core import ModuleCall, Op, Ref
from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.emit.modules.hints import value_names
from bigbrain_fx.emit.modules.names import (
    OWN,
    RESERVED,
    Names,
    device_names,
    identifier,
    is_attribute,
)
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.runtime.modules import Stage
from tests.support import samples
from tests.support.examples import examples
from tests.support.synthetic import graph_of, op

odd = st.text(st.sampled_from("aZ_09.'\" \n\\é字-()"), max_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hidden", "hidden"),
        ("blocks.0.norm", "blocks_0_norm"),
        ("0", "_0"),
        ("class", "class_"),
        ("match", "match_"),
        ("sum", "sum_"),
        ("torch", "torch_"),
        ("self", "self_"),
        ("m", "m_"),
        ("", "value"),
        ("字", "value"),
        ('a"b\n', "a_b"),
        ("__x__", "x"),
    ],
)
def test_identifier(text: str, expected: str) -> None:
    assert identifier(text) == expected


@pytest.mark.nightly
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=10), odd, st.sampled_from(sorted(RESERVED))))
def test_any_text_becomes_a_name(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    assert not keyword.iskeyword(name)
    assert name not in RESERVED
    assert identifier(name) == name


@pytest.mark.parametrize(
    ("devices", "modules"),
    [
        (["d0", "d1"], ["device_d0", "device_d1"]),
        (["torch", "json", "train"], ["device_torch", "device_json", "device_train"]),
        (["class", "4090", "rtx.4090"], ["device_class", "device_4090", "device_rtx_4090"]),
        (["gpu-0", "GPU_0"], ["device_gpu_0", "device_gpu_0_2"]),
        (["a-b", "a.b", "a_b_2"], ["device_a_b", "device_a_b_2", "device_a_b_2_2"]),
        (["é", "字", ""], ["device_unnamed", "device_unnamed_2", "device_unnamed_3"]),
    ],
)
def test_files_of_devices(devices: list[str], modules: list[str]) -> None:
    found = device_names(devices)
    assert [found[name].module for name in devices] == modules


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(st.one_of(odd, st.sampled_from(["1_0", "10", "1_0_2", "A", "a"])), unique=True))
def test_no_two_devices_have_a_file_or_a_class_in_common(devices: list[str]) -> None:
    found = device_names(devices).values()
    for names in ([n.module for n in found], [n.program for n in found]):
        assert len(set(names)) == len(devices)
        assert all(name.isidentifier() and name.isascii() for name in names)
    assert all(n.module == n.module.lower() for n in found)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(odd.map(identifier), max_size=20))
def test_no_name_twice(wanted: list[str]) -> None:
    names = Names()
    found = [names.fresh(name) for name in wanted]
    assert len(set(found)) == len(found)


WRITTEN = ("weight", "_x", "conv1", "Linear")


@pytest.mark.parametrize(
    "name", [*WRITTEN, *("0", "class", "a b", 'a"', "a\nb", "é", "", "__dict__", "a.b")]
)
def test_attributes_that_nobody_can_write_are_reached_by_subscript(name: str) -> None:
    assert is_attribute(name) == (name in WRITTEN)


def test_own_names_are_those_of_the_runtime() -> None:
    """A model's child of such a name is reached by subscript: `self["key"]`."""
    added = {name for name in dir(Stage) if not name.startswith("_")} - set(dir(nn.Module))
    assert added == OWN
    assert not any(map(is_attribute, OWN))


# --------------------------------------------------------------------------- the author's names


MINE = ModuleCall("blocks.0", "model.Block")


def line(name: str, target: str, code: str, *reads: str, source: str = "model.py:3") -> Op:
    """Make an op of a source line of the user's own module."""
    made = op(name, f"aten.{target}.default", *map(Ref, reads or ("x",)))
    return replace(made, modules=(MINE,), code=code, source=source)


def layer(name: str, path: str, kind: str = "torch.nn.modules.linear.Linear") -> Op:
    made = op(name, "aten.linear.default", Ref("x"))
    return replace(made, modules=(MINE, ModuleCall(path, kind)))


def named(*ops: Op) -> list[str]:
    found = value_names(graph_of(ops)).names
    return [found[entry.name] for entry in ops]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("hidden = F.relu(x)", "hidden"),
        ("hidden: Tensor = F.relu(x)", "hidden"),
        ("hidden += x", "hidden"),
        ("sum = x + 1", "sum_"),
        ("match = x + 1", "match_"),
        ("self.hidden = x", "hidden"),
        ('out["hidden"] = x', "hidden"),
        ("skips.append(F.relu(x))", "skip"),
        ("return F.relu(x)", "relu"),
        ("x = f(", "relu"),
        ("a, b = f(x)", "a"),
        ("_, b = f(x)", "b"),
        ("a, b, c = f(x)", "relu"),
        ("字 = f(x)", "value"),
        ("", "relu"),
    ],
)
def test_a_value_has_the_name_it_is_assigned_to(code: str, expected: str) -> None:
    assert named(line("v", "relu", code)) == [expected]


def test_parts_of_a_tuple_have_the_names_they_are_unpacked_to() -> None:
    code = "q, k = x.chunk(2)"
    whole = replace(line("t", "chunk", code), is_tuple=True)
    parts = [
        replace(line(name, "getitem", code, "t"), target="operator.getitem", args=(Ref("t"), i))
        for i, name in enumerate("ab")
    ]
    assert named(whole, *parts) == ["chunk", "q", "k"]


def test_the_last_op_of_a_line_is_what_is_assigned_and_each_call_is_a_line() -> None:
    code = "mixed = self.drop(F.relu(x))"
    assert named(line("a", "relu", code), line("b", "dropout", code, "a")) == ["relu", "mixed"]
    first = line("a", "relu", "y = F.relu(x)")
    second = replace(line("b", "relu", "y = F.relu(x)"), modules=(replace(MINE, call=1),))
    assert named(first, second) == ["y", "y"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("blocks.0.qkv", "qkv"), ("blocks.0.3", "linear"), ("class", "class_"), ('a"b', "a_b")],
)
def test_the_result_of_a_layer_is_called_like_the_layer(path: str, expected: str) -> None:
    assert named(layer("v", path)) == [expected]
    assert named(layer("v", path, "model.OfTheUsers")) == ["linear"]


def test_sizes_and_parts() -> None:
    rows = Op("rows", "aten.sym_size.int", (Ref("x"), 0))
    twice = Op("twice", "operator.mul", (Ref("rows"), 2))
    whole = op("whole", "aten.split.Tensor", Ref("x"), 2, is_tuple=True)
    part = op("part", "operator.getitem", Ref("whole"), 0)
    last = op("last", "aten.relu.default", Ref("part"))
    assert named(rows, twice, whole, part, last) == ["batch", "size", "split", "split", "relu"]


def test_names_in_a_real_model() -> None:
    text = samples.texts("gpt", "naive", 2, "1f1b", 4)["model_blocks.py"]
    assert "q, k, v = split.permute(2, 0, 3, 1, 4).unbind()  # gpt.py:42" in text
    assert "mixed = F.scaled_dot_product_attention(" in text


# --------------------------------------------------------------------------- code of the user's


OPS = """
import torch


class Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * {factor}

    @staticmethod
    def backward(ctx, g):
        return g * {factor}


class Scale(Stage):
    pass
"""


@pytest.fixture
def modules() -> Iterator[tuple[Any, Any]]:
    made = []
    for name, factor in (("own_ops_a", 2), ("own_ops_b", 5)):
        module = ModuleType(name)
        sys.modules[name] = module
        exec(compile(OPS.format(factor=factor), name, "exec"), module.__dict__)
        made.append(module)
    yield made[0], made[1]
    for module in made:
        del sys.modules[module.__name__]


class Net(nn.Module):
    def __init__(self, a: Any, b: Any) -> None:  # modules
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.ops = a.Stage, a.Scale, b.Scale

    def forward(self, x: Tensor) -> Tensor:
        stage, scale, other = self.ops
        return self.last(other.apply(scale.apply(stage.apply(self.first(x))))).sum()


def test_each_is_called_by_a_name_of_its_own(modules: tuple[Any, Any]) -> None:
    graph = samples.of_module(Net(*modules), {"x": torch.randn(4, 6)}, None).graph
    options = Options("naive", micro_batches=1)
    text = bundle_texts(make_plan(graph, samples.cluster(1), Source(""), options))["device_d0.py"]
    assert "from own_ops_a import Stage as own_ops_a_Stage, Scale\n" in text
    assert "from own_ops_b import Scale as own_ops_b_Scale\n" in text
    assert "own_ops_b_Scale.apply(Scale.apply(own_ops_a_Stage.apply(self.first(x))))" in text


class Twice(nn.Module):
    """The same two layers at its begin and at its end: what lies between is on either device."""

    def __init__(self, *, alike: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.d = (self.a, self.b) if alike else (nn.Linear(8, 8), nn.Linear(8, 8))
        self.between = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.b(self.a(x)).relu())
        return self.d(self.c(x)).sum()


def stages(model: nn.Module) -> list[str]:
    graph = samples.of_module(model, {"x": torch.randn(4, 8)}, None).graph
    options = Options("naive", micro_batches=1)
    files = bundle_texts(make_plan(graph, samples.cluster(2), Source(""), options))
    return [files[f"device_d{i}.py"].split(f"class Stage{i}")[1] for i in range(2)]


def test_a_comment_names_two_users_and_counts_the_others() -> None:
    first, second = stages(Twice())
    assert "`a.weight` is stage 1's `c.weight`, `a.bias` is stage 1's `c.bias`, and so on" in first
    assert "for 2 more: in a loop of your own, too, add up their gradients." in first.replace(
        "\n    ", " "
    )
    assert "`c.weight` is stage 0's `a.weight`" in second


def test_a_stage_that_shares_nothing_says_nothing() -> None:
    assert not any("of your own" in text for text in stages(Twice(alike=False)))


@pytest.mark.gate("0")
@pytest.mark.parametrize("place", [0, 1])
def test_weights_that_do_not_train_cannot_part(place: int) -> None:
    assert "of your own" not in stages(Twice().requires_grad_(requires_grad=False))[place]
