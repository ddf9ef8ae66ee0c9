"""Run a core.Graph in one process, op by op: the reference that bundles are compared with.

The module calls torch's own operators by their names in the graph, and knows nothing of stages,
emitters, or the origin of the graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Arg, Const, Graph, Op, ParamRef, Ref
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.translation import oracle
from bigbrain_fx.frontend.translation.kept import LEAF, LOSS
from bigbrain_fx.frontend.translation.leaf import run_leaf
from bigbrain_fx.frontend.translation.nests import decode
from bigbrain_fx.frontend.translation.opaque import PREFIX, function_of

Leaf = Callable[[str, str], Tensor]
Key = Callable[[Op], AbstractContextManager[object]]
Watch = Callable[[Op, object], None]


def run_graph(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    order: Iterable[str] | None = None,
    leaf: Leaf | None = None,
    key: Key | None = None,
    values: Iterable[str] | None = None,
    functions: Mapping[str, object] | None = None,
    device: torch.device | str = "cpu",
    watch: Watch | None = None,
) -> dict[str, object]:
    """Run a graph and return the requested values.

    Buffers that the graph writes into are changed in `tensors`. Gradients flow as in the user's
    module; take them with `torch.autograd.grad`.

    Args:
        graph: symbolic or concrete; sizes are read from the inputs.
        tensors: parameters, buffers and constants by name (`Captured.tensors`).
        inputs: the batch's tensors by name (`graph_inputs`).
        order: names of all ops in another valid order, the graph's own when left out.
        leaf: returns the tensor that an op reads for a parameter: `leaf(param, op)`. For ops in a
            region, `op` is the region's name.
        key: a context entered around each random op, or around a region with one.
        values: names of the values to return; the loss and the outputs when left out.
        functions: classes behind `opaque.` targets; imported by name when left out.
        device: device of the stage.
        watch: called with each op and its value, as soon as it has run; for ops in a region, too.

    Returns:
        Value by name; other values are freed after their last use.

    Raises:
        InputError: the graph needs an input or an op that is not there.
    """
    wanted = (
        list(values)
        if values is not None
        else [*([graph.loss] if graph.loss else []), *graph.outputs]
    )
    ops = [graph.op[name] for name in order] if order is not None else list(graph.ops)
    machine = Interpreter(tensors, leaf, functions or {}, torch.device(device), watch)
    read = {name for op in ops for name in op.refs}.union(wanted)
    missing = [e.name for e in graph.inputs if e.name not in inputs and e.name in read]
    if missing:
        raise InputError(
            f"the graph needs inputs {', '.join(missing)}, found {', '.join(inputs)}", code="BX2110"
        )
    with autocast(graph.autocast, machine.device):
        return machine.run(ops, dict(inputs), wanted, key)


def autocast(
    dtype: str | None, device: torch.device, *, casts_once: bool = True
) -> AbstractContextManager[object]:
    """Return the context of a step; `dtype` is the graph's.

    `casts_once`: a weight has one cast for all its uses, as in torch by default.
    """
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype), cache_enabled=casts_once)


class Interpreter:
    """Execution of the ops of one run, with all their arguments."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        leaf: Leaf | None,
        functions: Mapping[str, object],
        device: torch.device,
        watch: Watch | None,
    ) -> None:
        self.tensors = tensors
        self.leaf = leaf
        self.functions = functions
        self.device = device
        self.watch = watch

    def run(
        self,
        ops: Iterable[Op],
        env: dict[str, object],
        wanted: list[str],
        key: Key | None = None,
        owner: str | None = None,
    ) -> dict[str, object]:
        """Run ops in order; `owner` is the region that they are the body of."""
        ops = list(ops)
        last = last_uses(ops, wanted)
        for position, op in enumerate(ops):
            with key(op) if key is not None and op.random else nullcontext():
                env[op.name] = self.call(op, env, owner or op.name)
            if self.watch is not None:
                self.watch(op, env[op.name])
            for name in last.get(position, ()):
                env.pop(name, None)
        return {name: env[name] for name in wanted}

    def call(self, op: Op, env: Mapping[str, object], reader: str) -> object:
        """Run one op and return its value."""
        if op.body is not None:
            return self._region(op, env, reader)
        if op.target.startswith(LEAF) or op.target == LOSS:
            return self._kept(op, env, reader)
        args = [self.value(arg, env, reader) for arg in op.args]
        kwargs = {name: self.value(arg, env, reader) for name, arg in op.kwargs}
        if op.target.startswith(oracle.PREFIX):
            oracle.check(op, args[0])
            return None
        if op.target.startswith(PREFIX):
            function = self.functions.get(op.target) or function_of(op.target)
            return function.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
        return resolve(op.target)(*args, **kwargs)

    def _kept(self, op: Op, env: Mapping[str, object], reader: str) -> object:
        """Call the user's own Python: an opaque module, a loss."""
        own = self.functions.get(op.target)
        given = decode(op.args[0], lambda arg: self.value(arg, env, reader))
        tensors = [self.value(arg, env, reader) for arg in op.args[1:]]
        if isinstance(own, nn.Module) and op.target != LOSS:  # a loss has its tensors itself
            return run_leaf(own, tensors, given)
        if not callable(own):
            raise InputError(
                f"op {op.name} needs the user's own {op.target}, found none", code="BX2111"
            )
        return own(*cast("tuple[object, ...]", given))

    def _region(self, op: Op, env: Mapping[str, object], reader: str) -> object:
        body = op.body
        assert body is not None
        given = [self.value(arg, env, reader) for arg in op.args]
        inner = {entry.name: value for entry, value in zip(body.inputs, given, strict=True)}
        with ExitStack() as stack:
            stack.enter_context(self._mode(op))
            found = self.run(body.ops, inner, list(body.outputs), owner=reader)
        return tuple(found[name] for name in body.outputs)

    def _mode(self, op: Op) -> AbstractContextManager[object]:
        match op.target:
            case "region.no_grad":
                return torch.no_grad()
            case "region.enable_grad":
                return torch.enable_grad()
        options = {name: self.value(arg, {}, op.name) for name, arg in op.kwargs}
        return torch.autocast(self.device.type, **options)  # type: ignore[arg-type]

    def value(self, arg: Arg, env: Mapping[str, object], reader: str) -> object:
        """Return the value of an argument; `reader` is the op, or the region around it."""
        match arg:
            case Ref(value):
                return env[value]
            case ParamRef(param):
                return self.leaf(param, reader) if self.leaf else self.tensors[param]
            case Const(const):
                return self.device if const == "device" else constant(arg)
            case tuple():
                return [self.value(item, env, reader) for item in arg]
        return arg


def constant(value: Const) -> object:
    """Return the value of a constant's name: "torch.float32", "inf"."""
    if value.const.startswith("torch."):
        return getattr(torch, value.const.removeprefix("torch."))
    return value.number


@lru_cache(maxsize=4096)
def resolve(target: str) -> Callable[..., object]:
    """Return the function behind a target: "aten.add.Tensor", "operator.mul", "math.floor".

    Raises:
        InputError: this torch has no such operator.
    """
    space, _, rest = target.partition(".")
    if space == "library":  # see `rules.target_name`; its module registers it
        space, name, overload, *place = rest.split(".")
        importlib.import_module(".".join(place[:-1]))
        rest = f"{name}.{overload}"
    if space in ("operator", "math", "torch"):
        found = getattr(importlib.import_module(space), rest, None)
    else:
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), name, None)
        found = getattr(packet, overload, None)
    if found is None:
        raise InputError(f"torch {torch.__version__} has no operator {target}", code="BX2112")
    return found  # type: ignore[no-any-return]


def last_uses(ops: list[Op], wanted: list[str]) -> dict[int, list[str]]:
    """Name, for each position, the values without a later reader."""
    last: dict[str, int] = {}
    for position, op in enumerate(ops):
        last[op.name] = position
        last.update(dict.fromkeys(op.refs, position))
    freed: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in wanted:
            freed.setdefault(position, []).append(name)
    return freed
