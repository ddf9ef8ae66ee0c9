"""Emitted calls against the aten ops they stand for, and their text against the eye.

The calls are rows of tests/emit_calls/*.txt, one a line; README.txt there says how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from bigbrain_fx import core
from bigbrain_fx.emit.ops.call_template import short
from bigbrain_fx.emit.ops.calls import FORMS
from tests.support.written_calls import as_arg, op_of, text_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*reduction. 'mean' divides the total loss",
    "ignore:.*torch.meshgrid. in an upcoming release",
    "ignore:.*an output with one or more elements was resized",
)


@dataclass(frozen=True)
class Row:
    """One call: an op, its arguments as text, and the mark that README.txt explains."""

    target: str
    arguments: str
    mark: str

    def __str__(self) -> str:
        return f"{self.target.removeprefix('aten.')}({self.arguments})"


def read_rows() -> Iterator[Row]:
    for path in sorted((Path(__file__).parent / "emit_calls").glob("*.txt")):
        lines = path.read_text().splitlines() if path.stem != "README" else []
        for line in lines:
            if line and not line.startswith("#"):
                mark, names, arguments = re.fullmatch(r"([!~?]?)(.*?) <- (.*)", line).groups()  # type: ignore[union-attr]  # a row without an arrow must stop the test run
                yield from (Row(f"aten.{name}", arguments, mark) for name in names.split())


ROWS = tuple(read_rows())


def evaluate(row: Row) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a row's arguments; the same tensors every time."""
    generator = torch.Generator().manual_seed(7)
    randn = partial(torch.randn, generator=generator)
    rand = partial(torch.rand, generator=generator)
    makers = {
        "f": lambda *shape: randn(shape).requires_grad_(),
        "p": lambda *shape: (0.1 + 0.8 * rand(shape)).requires_grad_(),
        "n": lambda *shape: randn(shape),
        "c": lambda *shape: randn(shape, dtype=torch.complex64).requires_grad_(),
        "i": lambda high, *shape: torch.randint(high, shape, generator=generator),
        "b": lambda *shape: rand(shape) < 0.5,
        "ints": lambda *values: torch.tensor(values),
        "perm": lambda *shape: rand(shape).argsort(),
        "call": lambda *args, **kwargs: (args, kwargs),
        "CPU": torch.device("cpu"),
        "DIMS": next((int(digit) for digit in re.findall(r"(\d)d", row.target)), 0),
        "torch": torch,
    }
    args, kwargs = eval(f"call({row.arguments})", makers)
    return args, kwargs


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    return (
        [t for item in value for t in tensors_in(item)] if isinstance(value, list | tuple) else []
    )


def with_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """Put other values in the place of the tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(item, tensors) for item in value)
    return value


# --------------------------------------------------------------------------- the same numbers


class OpNames(TorchDispatchMode):
    """Record the ops that reach the backend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Outcome:
    """What one run did: its values and gradients to the bit, where they lie, the ops that ran."""

    values: object
    changed: object
    gradients: object
    shares: object
    ops: tuple[str, ...]


def bits(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        layout = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        return layout, bytes(flat.view(torch.uint8).tolist())
    return tuple(bits(item) for item in value) if isinstance(value, list | tuple) else (value,)


def run(row: Row, function: Callable[..., Any]) -> Outcome:
    """Call a function with a row's tensors as leaves, and differentiate what it returns."""
    leaves = [
        leaf.detach().requires_grad_(leaf.requires_grad) for leaf in tensors_in(evaluate(row))
    ]
    in_place = row.target.split(".")[1].endswith("_")
    tensors = [leaf.clone() if in_place and leaf.requires_grad else leaf for leaf in leaves]
    torch.manual_seed(3)
    with OpNames() as recorded:
        result = function(*tensors)
    outputs = [out for out in tensors_in(result) if out.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    torch.manual_seed(4)
    seeds = [torch.randn_like(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True) if outputs else ()
    homes = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    shares = [[o.untyped_storage().data_ptr() == h for h in homes] for o in tensors_in(result)]
    changed = bits(tensors)
    return Outcome(bits(result), changed, bits(gradients), shares, tuple(recorded.names))


def aten_call(row: Row) -> Callable[..., Any]:
    args, kwargs = evaluate(row)
    _, name, overload = row.target.split(".")
    op = getattr(getattr(torch.ops.aten, name), overload)

    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return op(*with_tensors(args, rest), **with_tensors(kwargs, rest))

    return call


def written_call(row: Row, device: str | None = "device") -> tuple[str, Callable[..., Any]]:
    args, kwargs = evaluate(row)
    count = len(tensors_in((args, kwargs)))
    refs = iter([core.Ref(f"x{i}") for i in range(count)])
    args, kwargs = with_tensors(args, refs), with_tensors(kwargs, refs)
    text = text_of(op_of(row.target, *args, **kwargs), device)
    names = ", ".join(f"x{i}" for i in range(count))
    space = {"torch": torch, "F": F, "device": torch.device("cpu")}
    function: Callable[..., Any] = eval(f"lambda {names}: {text}", space)
    return text, function


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_written_call_computes_what_the_op_computes(row: Row) -> None:
    expected = run(row, aten_call(row))
    for device in ("device", None) if "CPU" in row.arguments else ("device",):
        text, function = written_call(row, device)
        actual = run(row, function)
        assert ("torch.ops." in text) == (row.mark == "~"), text
        assert ("device" in text) == (device is not None and "CPU" in row.arguments), text
        if row.mark != "?":
            assert (actual.values, actual.changed) == (expected.values, expected.changed), text
        assert actual.shares == expected.shares, text
        assert actual.gradients == expected.gradients, text
        if row.mark != "!":
            assert actual.ops == expected.ops, text


def traced(row: Row, function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Trace a call as torch.export does, before composite ops are taken apart."""
    leaves = [tensor.detach() for tensor in tensors_in(evaluate(row))]
    graph = make_fx(lambda *tensors: function(*tensors), pre_dispatch=True)(*leaves).graph
    return [(str(n.target), str(n.args)) for n in graph.nodes if n.op == "call_function"]


# Reading a number out of a tensor ends a trace; `random_.from` makes fx write a syntax error.
UNTRACED = {"aten.item.default", "aten._local_scalar_dense.default", "aten.random_.from"}
TRACED = {row.target: row for row in ROWS if not row.mark and row.target not in UNTRACED}
OFTEN = 5  # of so many ops the gate traces one: the others' numbers and ops are held above


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=target, marks=[pytest.mark.nightly] * bool(number % OFTEN))
        for number, (target, row) in enumerate(TRACED.items())
    ],
)
def test_a_written_call_traces_back_to_the_same_op(row: Row) -> None:
    _, function = written_call(row)
    assert traced(row, function) == traced(row, aten_call(row))


# --------------------------------------------------------------------------- the tables


def test_every_form_has_a_row() -> None:
    aten = {target for target in FORMS if target.startswith("aten.")}
    assert aten - {row.target for row in ROWS} == set()
    assert len(aten) > 400


def test_signatures_are_the_schemas_of_their_ops() -> None:
    for target in FORMS:
        if target.startswith("aten."):
            check_signature(target)


def check_signature(target: str) -> None:
    _, name, overload = target.split(".")
    schema = getattr(getattr(torch.ops.aten, name), overload)._schema
    signature = FORMS[target].signature
    names = [name.rstrip("_") for name in signature.names]
    assert names == [argument.name for argument in schema.arguments], target
    for argument, name in zip(schema.arguments, signature.names, strict=True):
        if argument.has_default_value():
            default = short(name, schema_default(argument))
            assert repr(float_free(signature.defaults[name])) == repr(float_free(default)), target


def schema_default(argument: Any) -> core.Arg:
    value = argument.default_value
    kind = str(argument.type)
    if "ScalarType" in str(argument.real_type) and value == 4:
        return core.Const("torch.int64")
    if "MemoryFormat" in str(argument.real_type) and value == 0:
        return core.Const("torch.contiguous_format")
    if "List" in kind and isinstance(value, list) and len(set(value)) == 1:
        return as_arg(value[0])
    return as_arg(value)


def float_free(value: core.Arg) -> core.Arg:
    """Scalar arguments do not tell 1 from 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
