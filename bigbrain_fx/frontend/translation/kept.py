"""Opaque calls of the user's own Python: modules, lines, custom Functions, a loss.

While a trace records, such a call becomes one node `bigbrain_fx::kept`. The graph's op calls the
user's code again, so values and gradients are the user's. This file knows nodes and ops, not the
called code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx

from bigbrain_fx.core import OPAQUE_MODULE, Arg, Dim, Op, ParamRef, Ref, times
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.batch import unique
from bigbrain_fx.frontend.translation.nests import SizeSlot, TensorSlot, decode, encode, plain_value
from bigbrain_fx.frontend.translation.nodes import Place, literal, name_of, place_of, spec_of

if TYPE_CHECKING:
    from bigbrain_fx.frontend.translation.scope import Scope

KEPT = "bigbrain_fx.kept.default"
FUNCTION = "opaque."  # a custom torch.autograd.Function
LEAF = OPAQUE_MODULE
LOSS = "user.loss"


@dataclass
class KeptCall:
    """One call of the user's own Python.

    Attributes:
        target: "leaf.blocks.0.experts", "user.loss", "opaque.model.RoundSTE".
        name: a name for its value.
        args: its arguments, encoded, a `TensorSlot` for each tensor and a `SizeSlot` for each free
            size; a custom Function's as they are.
        params: names in the model of the tensors that it owns; they follow its other tensors.
        shapes: function of the tensors -> its results as fake tensors, and the facts learnt.
        result: its result, encoded, a `TensorSlot` for each tensor.
        outputs: number of tensors in `result`.
        random: whether it draws random numbers. mutates: names in `params` that it writes into.
        views: for each output tensor the index of the argument that it is a view of, or None.
        fixed: indices of output tensors without a gradient.
        left: attributes that it sets for later readers; `result` then has their values, too. state:
            attributes that its next call depends on.
        text: of its class, for lines of a forward.
    """

    target: str
    name: str
    args: Arg
    params: tuple[str, ...]
    shapes: Callable[[KeptCall, list[Tensor]], list[Tensor]]
    result: Arg = None
    outputs: int = 0
    random: bool = False
    mutates: tuple[str, ...] = ()
    views: tuple[int | None, ...] = ()
    fixed: frozenset[int] = frozenset()
    left: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    text: str = ""

    @property
    def single(self) -> bool:
        """Whether its result is one tensor."""
        return isinstance(self.result, TensorSlot)

    @property
    def is_function(self) -> bool:
        """Whether it is a call of a custom Function."""
        return self.target.startswith(FUNCTION)

    @property
    def slots(self) -> tuple[int | None, ...]:
        """Indices of its output tensors in its op's result; None for other values."""
        if not self.is_function or self.single:
            return tuple(range(self.outputs))
        _, items = cast("tuple[str, tuple[object, ...]]", self.result)
        return tuple(item.index if isinstance(item, TensorSlot) else None for item in items)


@dataclass
class Keeper:
    """The opaque calls of one trace, by the key that their node carries."""

    calls: dict[str, KeptCall] = field(default_factory=dict)

    def call(
        self, call: KeptCall, tensors: Sequence[Tensor], sizes: Sequence[torch.SymInt] = ()
    ) -> object:
        """Record one call and return its result as the traced node gives it."""
        key = f"kept_{len(self.calls)}"
        self.calls[key] = call
        found = torch.ops.bigbrain_fx.kept.default(list(tensors), list(sizes), key)
        return decode(call.result, lambda arg: placed(arg, found))


_active: list[Keeper] = []


@torch.library.custom_op(
    "bigbrain_fx::kept",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]",
)
def _kept(tensors: list[Tensor], sizes: list[int], key: str) -> list[Tensor]:
    raise CaptureError(
        f"kept call {key} exists in a trace only; run the captured graph instead", code="BX2175"
    )


@_kept.register_fake
def _(tensors: Sequence[Tensor], _sizes: Sequence[int], key: str) -> list[Tensor]:
    call = _active[-1].calls[key]
    with nullcontext() if call.is_function else torch._C.DisableTorchFunction():
        return call.shapes(call, list(tensors))


def keep(call: KeptCall, tensors: Sequence[Tensor]) -> object:
    """Record a call of the trace that is made; return its result as the traced node gives it."""
    return _active[-1].call(call, tensors)


@contextmanager
def keeping() -> Iterator[Keeper]:
    """Record the opaque calls of a trace."""
    keeper = Keeper()
    _active.append(keeper)
    try:
        yield keeper
    finally:
        _active.pop()


def place(
    value: object,
    tensors: list[Tensor],
    sizes: list[torch.SymInt] | None = None,
    *,
    lenient: bool = False,
) -> Arg:
    """Encode a call's arguments; their tensors are added to the list, free sizes to theirs.

    Without a list of sizes a free one is an argument that no graph can hold.
    """

    def leaf(item: Tensor | torch.SymInt) -> Arg:
        if isinstance(item, Tensor):
            tensors.append(item)
            return cast("Arg", TensorSlot(len(tensors) - 1))
        if sizes is None:
            return literal(item)
        sizes.append(item)
        return cast("Arg", SizeSlot(len(sizes) - 1))

    return encode(value, leaf, lenient=lenient)


def placed(arg: object, tensors: Sequence[object], sizes: Sequence[object] = ()) -> object:
    """Return the value of a leaf of a nest: a tensor, a free size, else the literal."""
    if isinstance(arg, SizeSlot):
        return sizes[arg.index]
    return tensors[arg.index] if isinstance(arg, TensorSlot) else plain_value(cast("Arg", arg))


def translate_kept(scope: Scope, node: fx.Node) -> None:
    """Add the op of an opaque call; parts of its result are then known to `scope`."""
    tensors, sizes, key = cast("tuple[list[fx.Node], list[object], str]", node.args)
    call = scope.world.kept[key]
    args = _arguments(scope, call, [*map(scope.arg, tensors)], [*map(scope.arg, sizes)])
    needs = scope.grad and any(scope.world.needs_gradient(arg) for arg in args)
    specs = [
        spec_of(tensor, needs and i not in call.fixed)
        for i, tensor in enumerate(cast("list[Tensor]", node.meta["val"]))
    ]
    owner = next((scope.arg(tensors[i]) for i in call.views if i is not None), None)
    cost = scope._cost(call.target, args, specs, owner is not None)
    op = Op(
        unique(call.name, scope.world.names),
        call.target,
        args,
        outputs=tuple(specs),
        is_tuple=not call.single,
        random=call.random,
        mutates=call.mutates,
        view_of=name_of(owner),
        flops=cost["flops"] if call.is_function else _work(scope, call, args),
        reads_bytes=cost["reads_bytes"],
        writes_bytes=cost["writes_bytes"],
        **_place_of(call, node),
    )
    scope.opaque[node] = (scope.add(op), call)
    scope.world.specs[op.name] = tuple(None if i is None else specs[i] for i in call.slots)
    scope.env[node] = Ref(op.name)


def _place_of(call: KeptCall, node: fx.Node) -> Place:
    """Return where a call is from; of lines of a forward the text of their class, too."""
    place = place_of(node)
    if call.text:
        place["code"] = call.text
    return place


def _arguments(
    scope: Scope, call: KeptCall, tensors: Sequence[Arg], sizes: Sequence[Arg]
) -> tuple[Arg, ...]:
    """Return the arguments of a call's op: its nest and its own tensors, or a Function's own."""
    if call.is_function:
        own = cast("tuple[object, ...]", call.args)
        return tuple(tensors[a.index] if isinstance(a, TensorSlot) else scope.arg(a) for a in own)
    nest = _with_values(call.args, tensors, sizes)
    nest = _with_names(nest, call.left, call.state)
    return (nest, *(ParamRef(name) for name in call.params))


def _with_names(nest: Arg, left: tuple[str, ...], state: tuple[str, ...]) -> Arg:
    """Return an opaque module's arguments, the attributes that its op returns, and its state."""
    if not (left or state):
        return nest
    kind, items = cast("tuple[str, tuple[Arg, ...]]", nest)
    more = [("tuple", left), ("tuple", state)] if state else [("tuple", left)]
    return (kind, (*items, *more))


def _with_values(arg: object, tensors: Sequence[Arg], sizes: Sequence[Arg]) -> Arg:
    if isinstance(arg, TensorSlot | SizeSlot):
        return (sizes if isinstance(arg, SizeSlot) else tensors)[arg.index]
    if isinstance(arg, tuple):
        return tuple(_with_values(item, tensors, sizes) for item in arg)
    return cast("Arg", arg)


def _work(scope: Scope, call: KeptCall, args: tuple[Arg, ...]) -> Dim:
    """Estimate an opaque module's work: every number of its parameters once for each row."""
    given = scope._specs_of(args[0])
    weights = [scope.world.store.spec(name) for name in call.params]
    count = sum(spec.numel for spec in weights if spec.requires_grad)
    return times(2, count, *given[0].shape[:-1]) if given and count else 0
