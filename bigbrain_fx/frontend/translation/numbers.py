"""Numbers that Python reads from tensors, `k = x.max().item()`: graphs have them as tensors.

    item(max_1) ─▶ max_1.detach().to(float64)      a number of Python is a float64 without gradient

A tensor of no dimension promotes nothing, as Python's numbers do, so `h / k` computes the same. If
the two would differ (a size, a result of no dimension) the model is refused. The module knows the
calls that read and use such numbers, and no other ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from bigbrain_fx.core import Arg, Const, Op, Ref, TensorSpec
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.batch import unique
from bigbrain_fx.frontend.translation.nodes import place_of
from bigbrain_fx.frontend.translation.refusals import number_read

if TYPE_CHECKING:
    from bigbrain_fx.frontend.translation.scope import Scope

_ITEM = ("aten.item.default", "aten._local_scalar_dense.default")
_ARITHMETIC: dict[Callable[..., object], str] = {
    operator.add: "aten.add.Tensor",
    operator.sub: "aten.sub.Tensor",
    operator.mul: "aten.mul.Tensor",
    operator.truediv: "aten.div.Tensor",
}
_KINDS = {torch.SymFloat: "float64", torch.SymInt: "int64", torch.SymBool: "bool"}


def translate_number(scope: Scope, node: fx.Node) -> bool:
    """Translate a call that reads a number or computes with one; say whether it is such a call.

    Raises:
        CaptureError: a number is used where no tensor can stand for it.
    """
    if str(node.target) in _ITEM:
        _read(scope, node)
    elif not any(_is_number(scope, entry) for entry in node.all_input_nodes):
        return False
    elif isinstance(node.target, OpOverload):
        _check_use(scope, node, node.target)
        return False
    elif node.target is torch.sym_float:
        _cast(scope, node, scope.arg(node.args[0]), "float64")
    else:
        _compute(scope, node)
    return True


def _is_number(scope: Scope, node: fx.Node) -> bool:
    arg = scope.env.get(node)
    return isinstance(arg, Ref) and arg.value in scope.world.numbers


def _read(scope: Scope, node: fx.Node) -> None:
    source, value = node.args[0], node.meta.get("val")
    assert isinstance(source, fx.Node)
    if not node.users:  # of a tensor made of constants alone: torch knew the number
        return
    kind = _KINDS.get(type(value))
    if kind is None or source.meta["val"].dim():
        raise _refused(node)
    arg = scope.arg(source)
    if scope.world.needs_gradient(arg):
        spec = TensorSpec((), str(source.meta["val"].dtype).removeprefix("torch."), ())
        owner = arg.value if isinstance(arg, Ref) else None
        arg = Ref(_add(scope, node, "aten.detach.default", (arg,), spec, owner))
    _cast(scope, node, arg, kind)


def _cast(scope: Scope, node: fx.Node, arg: Arg, kind: str) -> None:
    specs = scope._specs_of(arg)
    if specs and specs[0].dtype == kind:
        scope.env[node] = arg
        assert isinstance(arg, Ref)
        scope.world.numbers.add(arg.value)
        return
    target = "aten.to.dtype"
    _give(scope, node, target, (arg, Const(f"torch.{kind}")), kind)


def _compute(scope: Scope, node: fx.Node) -> None:
    """Translate arithmetic of Python: on float64 it is the same; a plain number comes second."""
    target = _ARITHMETIC.get(node.target) if callable(node.target) else None
    kind = _KINDS.get(type(node.meta.get("val")))
    args = [scope.arg(arg) for arg in node.args]
    if target is None or kind is None or len(args) != 2:
        raise _refused(node)
    if not isinstance(args[0], Ref):
        if node.target not in (operator.add, operator.mul):
            raise _refused(node)
        args.reverse()
    kinds = {spec.dtype for arg in args for spec in scope._specs_of(arg)}
    if kinds != {kind} or any(isinstance(a, Ref) and not scope._specs_of(a) for a in args):
        raise _refused(node)
    _give(scope, node, target, tuple(args), kind)


def _check_use(scope: Scope, node: fx.Node, target: OpOverload) -> None:
    """Allow a number beside a tensor with dimensions: the result has the tensor's type."""
    tensors = [n.meta["val"] for n in node.all_input_nodes if not _is_number(scope, n)]
    shaped = [t for t in tensors if isinstance(t, Tensor) and t.dim()]
    result = node.meta.get("val")
    as_tensor = all(_takes_tensor(target, i) for i in _positions(scope, node))
    same = isinstance(result, Tensor) and any(t.dtype == result.dtype for t in shaped)
    if not as_tensor or not same or node.kwargs:
        raise _refused(node)


def _positions(scope: Scope, node: fx.Node) -> Iterator[int]:
    for i, arg in enumerate(node.args):
        if isinstance(arg, fx.Node) and _is_number(scope, arg):
            yield i
        elif isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, fx.Node) and _is_number(scope, item):
                    yield -1  # sizes: no tensor can be one


def _takes_tensor(target: OpOverload, position: int) -> bool:
    return position >= 0 and isinstance(target._schema.arguments[position].type, torch.TensorType)


def _give(scope: Scope, node: fx.Node, target: str, args: tuple[Arg, ...], kind: str) -> None:
    name = _add(scope, node, target, args, TensorSpec((), kind, ()), None)
    scope.env[node] = Ref(name)
    scope.world.numbers.add(name)


def _add(
    scope: Scope,
    node: fx.Node,
    target: str,
    args: tuple[Arg, ...],
    spec: TensorSpec,
    view_of: str | None,
) -> str:
    name = unique(target.split(".")[1], scope.world.names)
    return scope.add(Op(name, target, args, outputs=(spec,), view_of=view_of, **place_of(node)))


def _refused(node: fx.Node) -> CaptureError:
    place = place_of(node)
    return number_read(place["source"] or None, place["code"])
