"""The text of emitted calls, against the eye; and what must never be written."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bigbrain_fx import core, emit
from bigbrain_fx.emit.ops.call_table_tensor import NUMBERS
from bigbrain_fx.emit.ops.calls import call_expression
from bigbrain_fx.errors import InputError
from tests.support.allowed_calls import ALLOWED_CALLS, RESERVED_NAMES, is_allowed_call
from tests.support.written_calls import name_of, op_of, text_of

x, y, z, w = (core.Ref(name) for name in "xyzw")

SPACE = {
    **{name: core.Ref(name) for name in "xyzwbn"},
    "P": core.ParamRef,
    "CPU": torch.device("cpu"),
    "INT_MAX": 9223372036854775807,
    "torch": torch,
    "op_of": op_of,
}


def read_texts() -> Iterator[tuple[str, core.Op]]:
    for line in Path(__file__).with_name("call_texts.txt").read_text().splitlines():
        if not line.startswith("#"):
            text, call = line.split("  <-  ")
            target, arguments = call.split("(", 1)
            yield text, eval(f"op_of({target!r}, {arguments}", SPACE)


TEXTS = tuple(read_texts())


@pytest.mark.parametrize(("text", "op"), TEXTS, ids=[text for text, _ in TEXTS])
def test_a_call_reads_as_people_write_it(text: str, op: core.Op) -> None:
    assert text_of(op) == text


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("torch.arange(4)", op_of("aten.arange.default", 4, device=torch.device("cpu"))),
        ("x", op_of("aten.to.dtype_layout", x, device=torch.device("cpu"))),
        ("x.float()", op_of("aten.to.device", x, torch.device("cpu"), torch.float32)),
        (
            "torch.ops.aten.to.prim_Device(x, torch.device('cpu'))",
            op_of("aten.to.prim_Device", x, torch.device("cpu")),
        ),
    ],
)
def test_without_a_device_none_is_named(text: str, op: core.Op) -> None:
    assert text_of(op, device=None) == text


def test_operators_keep_their_order_inside_each_other() -> None:
    terms = {"x": "a + b", "y": "-c", "z": "d ** e"}

    def value(ref: core.Ref | core.ParamRef) -> ast.expr:
        assert isinstance(ref, core.Ref)
        return ast.parse(terms[ref.value], mode="eval").body

    def text(target: str, *args: core.Arg) -> str:
        return ast.unparse(call_expression(op_of(target, *args), value, None))

    assert text("aten.mul.Tensor", x, y) == "(a + b) * -c"
    assert text("aten.pow.Tensor_Tensor", y, z) == "(-c) ** d ** e"
    assert text("aten.pow.Tensor_Tensor", z, x) == "(d ** e) ** (a + b)"
    assert text("aten.slice.Tensor", x, 0, 1, 3) == "(a + b)[1:3]"
    assert text("aten.sum.default", y) == "(-c).sum()"
    assert text("aten.pow.Scalar", -2, y) == "(-2) ** (-c)"


def test_a_number_held_by_an_attribute_is_written_only_where_any_value_is_exact() -> None:
    n = core.Ref("n")
    assert text_of(op_of("aten.dropout.default", x, n, True)) == "F.dropout(x, n)"
    assert text_of(op_of("aten.conv2d.default", x, y, None, [n, n])) == (
        "F.conv2d(x, y, stride=(n, n))"
    )
    for op in (
        op_of("aten.mse_loss.default", x, y, n),
        op_of("aten.embedding.default", x, y, n),
        op_of("aten.select.int", x, n, 0),
        op_of("aten.slice.Tensor", x, n, 0, 2),
    ):
        assert text_of(op).startswith("torch.ops.aten.")


def test_strings_and_numbers_are_quoted_as_python_reads_them() -> None:
    quoted = op_of("aten.pad.default", x, [1, 1], 'it\'s "x"\n\\', float("nan"))
    assert text_of(quoted) == r"""F.pad(x, (1, 1), mode='it\'s "x"\n\\', value=float('nan'))"""
    assert text_of(op_of("aten.mul.Tensor", x, -0.0)) == "x * -0.0"
    assert text_of(op_of("aten.fill_.Scalar", x, 0.1 + 0.2)) == "x.fill_(0.30000000000000004)"
    assert text_of(op_of("aten.fill_.Scalar", x, False)) == "x.fill_(False)"


@pytest.mark.parametrize("signature", NUMBERS)
def test_arithmetic_on_sizes_is_pythons_own(signature: str) -> None:
    target = signature.partition("(")[0]
    module, name = target.split(".")
    function = getattr({"operator": operator, "math": math, "torch": torch}[module], name)
    numbers: tuple[Any, ...] = (12, 5) if "b" in signature.partition("(")[2] else (12,)
    if name in ("getitem", "sym_sum"):
        numbers = ((12, 5, 7), 1)[: len(numbers)]
    expected = function(*numbers)
    assert eval(text_of(op_of(target, *numbers)), {"math": math}) == expected
    assert type(eval(text_of(op_of(target, *numbers)), {"math": math})) is type(expected)


# --------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    "target",
    [
        "region.no_grad",
        "opaque.model.Matcher",
        "os.system",
        "aten.add",
        "aten.add.Tensor.__globals__",
        "aten.add;import os.x",
        "aten.add.Ten sor",
        "aten.add.Tensor\n",
        "aten.random_.import",
        "aten.é.default",
        "operator.methodcaller",
        "builtins.eval",
    ],
)
def test_a_target_that_is_no_aten_op_is_refused(target: str) -> None:
    op = core.Op("y", target, (x,), source="gpt.py:31", code="y = f(x)")
    with pytest.raises(InputError, match="expected an aten op or arithmetic on sizes") as caught:
        call_expression(op, name_of, None)
    assert "at: gpt.py:31" in str(caught.value)
    assert "y = f(x)" in str(caught.value)


@pytest.mark.parametrize("name", ["from", "x)(", "a b", ""])
def test_an_argument_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        call_expression(core.Op("y", "aten.foo.default", (x,), ((name, 1),)), name_of, None)


@pytest.mark.parametrize("const", ["torch.load", "os.environ", "torch.float32.__class__", ""])
def test_a_constant_that_torch_does_not_have_is_refused(const: str) -> None:
    with pytest.raises(InputError, match="expected a constant such as"):
        call_expression(op_of("aten.mul.Tensor", x, core.Const(const)), name_of, None)


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        ("F.linear", True),
        ("torch.fft.rfft", True),
        ("(a + b).view", True),
        ("x.float", True),
        ("float", True),
        ("torch.ops.aten.renorm.default", True),
        ("torch.load", False),
        ("torch.ops.aten.renorm", False),
        ("torch.ops.load_library", False),
        ("torch.view", False),
        ("os.system", False),
        ("x.__class__", False),
        ("eval", False),
        ("view", False),
        ("f()[0]", False),
    ],
)
def test_calls_are_checked_against_the_list(call: str, allowed: bool) -> None:
    assert is_allowed_call(ast.parse(call, mode="eval").body) == allowed


def test_the_list_names_only_what_torch_has() -> None:
    space = {"torch": torch, "F": F, "math": math}
    for name in sorted(ALLOWED_CALLS):
        if name.startswith("."):
            assert callable(getattr(torch.Tensor, name[1:]))
        else:
            assert callable(eval(name, dict(space)))
    assert {"torch", "F", "math", "float", "int", "max", "min", "sum"} == RESERVED_NAMES


def test_writing_calls_does_not_import_torch() -> None:
    for path in (Path(emit.__file__).parent / "ops").glob("call*.py"):
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import torch", "from torch"))]
