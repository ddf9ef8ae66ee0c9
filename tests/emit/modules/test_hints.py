"""Values are called what the model's author called them, else after their layer, else their op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import ModuleCall, Op, Ref
from bigbrain_fx.emit.modules.hints import value_names
from tests.support import samples
from tests.support.synthetic import graph_of, op

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
