"""The text of emitted calls, against the eye; and what must never be written."""

from __future__ import annotations

import ast
import math
import operator
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
INT_MAX = 9223372036854775807

TEXTS = [
    ("x + y", op_of("aten.add.Tensor", x, y)),
    ("torch.add(x, y, alpha=2)", op_of("aten.add.Tensor", x, y, alpha=2)),
    ("1 - x", op_of("aten.rsub.Scalar", x, 1)),
    ("x * -0.5", op_of("aten.mul.Tensor", x, -0.5)),
    ("x ** 2", op_of("aten.pow.Tensor_Scalar", x, 2)),
    (
        "torch.div(x, 2, rounding_mode='floor')",
        op_of("aten.div.Tensor_mode", x, 2, rounding_mode="floor"),
    ),
    ("torch.ops.aten.div.Tensor(2, x)", op_of("aten.div.Tensor", 2, x)),
    ("x <= y", op_of("aten.le.Tensor", x, y)),
    ("~x", op_of("aten.bitwise_not.default", x)),
    ("x & y", op_of("aten.__and__.Tensor", x, y)),
    ("x @ y", op_of("aten.matmul.default", x, y)),
    ("x[0]", op_of("operator.getitem", x, 0)),
    ("b * 4", op_of("operator.mul", core.Ref("b"), 4)),
    ("b // 2", op_of("operator.floordiv", core.Ref("b"), 2)),
    ("max(b, 1)", op_of("torch.sym_max", core.Ref("b"), 1)),
    ("x.size(0)", op_of("aten.sym_size.int", x, 0)),
    ("x[1:]", op_of("aten.slice.Tensor", x, 0, 1, INT_MAX)),
    ("x[:, 1:3]", op_of("aten.slice.Tensor", x, 1, 1, 3)),
    ("x[:, :, ::2]", op_of("aten.slice.Tensor", x, 2, 0, INT_MAX, 2)),
    ("x[..., :-1]", op_of("aten.slice.Tensor", x, -1, 0, -1)),
    ("x[..., 1:3, :]", op_of("aten.slice.Tensor", x, -2, 1, 3)),
    ("x[:n]", op_of("aten.slice.Tensor", x, 0, None, core.Ref("n"))),
    ("x[:, 0]", op_of("aten.select.int", x, 1, 0)),
    ("x[..., -1]", op_of("aten.select.int", x, -1, -1)),
    ("x[y]", op_of("aten.index.Tensor", x, [y])),
    ("x[:, y, z]", op_of("aten.index.Tensor", x, [None, y, z])),
    ("x.unsqueeze(1)", op_of("aten.unsqueeze.default", x, 1)),
    ("x.view(b, 32, 4)", op_of("aten.view.default", x, [core.Ref("b"), 32, 4])),
    ("x.view(())", op_of("aten.view.default", x, [])),
    ("x.expand(-1, 4)", op_of("aten.expand.default", x, [-1, 4])),
    ("x.transpose(1, 2)", op_of("aten.transpose.int", x, 1, 2)),
    ("x.flatten(1)", op_of("aten.flatten.using_ints", x, 1)),
    ("x.flatten(0, 1)", op_of("aten.flatten.using_ints", x, 0, 1)),
    ("x.chunk(3, dim=-1)", op_of("aten.chunk.default", x, 3, -1)),
    ("x.split([2, 3])", op_of("aten.split_with_sizes.default", x, [2, 3])),
    ("x.contiguous()", op_of("aten.contiguous.default", x)),
    ("x.float()", op_of("aten.to.dtype", x, torch.float32)),
    ("x.to(torch.bfloat16)", op_of("aten.to.dtype", x, torch.bfloat16)),
    ("x.to(device)", op_of("aten.to.dtype_layout", x, device=torch.device("cpu"))),
    ("x.mean(dim=-1, keepdim=True)", op_of("aten.mean.dim", x, [-1], True)),
    ("x.masked_fill(y, float('-inf'))", op_of("aten.masked_fill.Scalar", x, y, float("-inf"))),
    ("torch.clamp(x, min=0.0)", op_of("aten.clamp.default", x, 0.0)),
    ("torch.cat([x, y], dim=1)", op_of("aten.cat.default", [x, y], 1)),
    ("torch.einsum('ij,jk->ik', x, y)", op_of("aten.einsum.default", "ij,jk->ik", [x, y])),
    ("F.linear(x, self.weight)", op_of("aten.linear.default", x, core.ParamRef("weight"))),
    (
        "F.embedding(x, self.wte.weight)",
        op_of("aten.embedding.default", core.ParamRef("wte.weight"), x),
    ),
    ("F.layer_norm(x, (8,), y, z)", op_of("aten.layer_norm.default", x, [8], y, z, 1e-5)),
    ("F.rms_norm(x, (8,), y, eps=1e-06)", op_of("aten.rms_norm.default", x, [8], y, 1e-6)),
    (
        "F.batch_norm(x, z, w, y, None, training=True, momentum=0.1, eps=1e-05)",
        op_of("aten.batch_norm.default", x, y, None, z, w, True, 0.1, 1e-5, True),
    ),
    ("F.dropout(x, 0.1)", op_of("aten.dropout.default", x, 0.1, True)),
    ("F.dropout(x, 0.1, training=False)", op_of("aten.dropout.default", x, 0.1, False)),
    (
        "F.conv2d(x, y, stride=2, padding=1)",
        op_of("aten.conv2d.default", x, y, None, [2, 2], [1, 1]),
    ),
    ("F.max_pool2d(x, (3, 2), stride=2)", op_of("aten.max_pool2d.default", x, [3, 2], [2, 2])),
    (
        "F.interpolate(x, scale_factor=2.0, mode='nearest')",
        op_of("aten.upsample_nearest2d.vec", x, None, [2.0, 2.0]),
    ),
    (
        "F.scaled_dot_product_attention(x, y, z, dropout_p=0.1, is_causal=True)",
        op_of("aten.scaled_dot_product_attention.default", x, y, z, None, 0.1, True),
    ),
    ("F.gelu(x, approximate='tanh')", op_of("aten.gelu.default", x, approximate="tanh")),
    ("F.relu(x, inplace=True)", op_of("aten.relu_.default", x)),
    ("F.softmax(x, dim=-1, dtype=torch.float32)", op_of("aten.softmax.int", x, -1, torch.float32)),
    (
        "F.cross_entropy(x, y, reduction='sum', label_smoothing=0.1)",
        op_of("aten.cross_entropy_loss.default", x, y, None, 2, -100, 0.1),
    ),
    ("F.pad(x, (1, 1), value=-1.0)", op_of("aten.pad.default", x, [1, 1], "constant", -1.0)),
    (
        "torch.arange(n, dtype=torch.int64, device=device)",
        op_of(
            "aten.arange.default",
            core.Ref("n"),
            dtype=torch.int64,
            layout=torch.strided,
            device=torch.device("cpu"),
            pin_memory=False,
        ),
    ),
    (
        "torch.ops.aten.zeros.default((2, 3), layout=torch.sparse_coo)",
        op_of("aten.zeros.default", [2, 3], layout=torch.sparse_coo),
    ),
    ("torch.ops.aten.index.Tensor(x, (None, None))", op_of("aten.index.Tensor", x, [None, None])),
    ("torch.zeros(b, 4)", op_of("aten.zeros.default", [core.Ref("b"), 4], pin_memory=False)),
    ("x.new_ones((2, 3))", op_of("aten.new_ones.default", x, [2, 3], pin_memory=False)),
    ("self.running.add_(1)", op_of("aten.add_.Tensor", core.ParamRef("running"), 1)),
    ("x.uniform_(-1.0, 2.0)", op_of("aten.uniform_.default", x, -1.0, 2.0)),
    ("torch.ops.aten.renorm.default(x, 2, 0, 1.0)", op_of("aten.renorm.default", x, 2, 0, 1.0)),
    (
        "torch.ops.aten.empty_strided.default((2,), (1,), device=device)",
        op_of("aten.empty_strided.default", [2], [1], device=torch.device("cpu")),
    ),
]


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
