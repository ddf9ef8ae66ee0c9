"""fx calls -> ops, one after the other: the workbench of `translate`.

Asserts and calls that do nothing are dropped; a write into a fresh activation becomes the plain op.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from bigbrain_fx.core import Arg, Dim, Op, ParamRef, Ref, TensorSpec, flops, moved
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation import regions, rules
from bigbrain_fx.frontend.translation.batch import unique
from bigbrain_fx.frontend.translation.kept import KEPT, KeptCall, translate_kept
from bigbrain_fx.frontend.translation.nodes import (
    inside,
    kept_kwargs,
    literal,
    name_of,
    place_of,
    same_tensor,
    spec_of,
    specs_of,
    storage,
    tidy,
)
from bigbrain_fx.frontend.translation.oracle import ASSUME, translate_assumption
from bigbrain_fx.frontend.translation.params import Store
from bigbrain_fx.frontend.translation.refusals import number_read, without_memory
from bigbrain_fx.frontend.translation.sources import line_of
from bigbrain_fx.frontend.translation.trace_refusals import CUSTOM_OPERATOR

_KNOWN = ("aten", "library")  # torch's own, and what a module made that a bundle can import


_READS = ("aten.item.default", "aten._local_scalar_dense.default")


def _require_unread(node: fx.Node) -> None:
    """Refuse a number that Python reads from a tensor; of a constant torch knew it."""
    if node.users:
        place = place_of(node)
        raise inside(node, number_read(place["source"] or None, place["code"]))


class Cost(TypedDict):
    """Computation and traffic of an op, as fields of `Op`."""

    flops: Dim
    reads_bytes: Dim
    writes_bytes: Dim


@dataclass
class World:
    """Shared state of all scopes of one trace.

    Attributes:
        store: the model's tensors. kept: opaque calls of the user's own Python, by key.
        written: storages that some call writes into.
        names: names taken so far. specs: the tensors of each value, None for an entry that is none.
        root: the value or param that owns each value's storage.
    """

    store: Store
    kept: Mapping[str, KeptCall]
    written: frozenset[int]
    names: set[str] = field(default_factory=set)
    specs: dict[str, tuple[TensorSpec | None, ...]] = field(default_factory=dict)
    root: dict[str, str] = field(default_factory=dict)
    grown: set[str] = field(default_factory=set)

    def needs_gradient(self, arg: Arg) -> bool:
        """Whether a gradient flows through an argument."""
        if isinstance(arg, Ref):
            specs = self.specs.get(arg.value, ())
            grown = self.root.get(arg.value, arg.value) in self.grown
            return grown or any(spec is not None and spec.requires_grad for spec in specs)
        if isinstance(arg, ParamRef):
            own = self.store.tensors[arg.param]
            return own.requires_grad and isinstance(own, nn.Parameter)
        return isinstance(arg, tuple) and any(self.needs_gradient(item) for item in arg)


@dataclass
class Scope:
    """One list of ops under construction: the graph, or the body of a region.

    Attributes:
        env: node -> its value. fresh: new values with storage of their own.
        renamed: values replaced by the result of a call that wrote into them.
        autocast: the type that ops are cast to there, by torch's name.
    """

    world: World
    grad: bool = True
    autocast: str | None = None
    env: dict[fx.Node, Arg] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    viewed: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    opaque: dict[fx.Node, tuple[str, KeptCall]] = field(default_factory=dict)

    def run(self, nodes: Iterable[fx.Node]) -> None:
        """Translate nodes in order."""
        for node in nodes:
            if node.op == "call_function":
                try:
                    self._call(node)
                except NotImplementedError as error:  # of a sparse tensor, or of vmap
                    line = line_of(node.meta.get("stack_trace"))
                    raise inside(node, without_memory(error, *line)) from error
                except CaptureError as error:
                    error.at = error.at or line_of(node.meta.get("stack_trace"))[0] or None
                    raise

    def inside(self, kind: str, autocast: str | None) -> Scope:
        """Open the body of a region."""
        grad = {"region.no_grad": False, "region.enable_grad": True}.get(kind, self.grad)
        return Scope(self.world, grad, autocast, renamed=self.renamed)

    def arg(self, value: object) -> Arg:
        """Translate one argument of a call."""
        if isinstance(value, fx.Node):
            return self._current(self.env[value])
        if isinstance(value, list | tuple):
            return tuple(self.arg(item) for item in value)
        return literal(value)

    def _current(self, arg: Arg) -> Arg:
        while isinstance(arg, Ref) and arg.value in self.renamed:
            arg = Ref(self.renamed[arg.value])
        return arg

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if rules.is_dropped(target):
            return
        if isinstance(target, torch._ops.HigherOrderOperator):
            regions.translate_region(self, node)
        elif str(target) == ASSUME:
            translate_assumption(self, node)
        elif str(target) == KEPT:
            translate_kept(self, node)
        elif target is operator.getitem:
            self._getitem(node)
        elif str(target) in _READS:
            _require_unread(node)
        elif (same := self._does_nothing(node)) is not None:
            self.env[node] = same
        else:
            self._op(node)

    def _does_nothing(self, node: fx.Node) -> Arg | None:
        """Return the argument that a call returns unchanged, None when it has an effect."""
        kind = rules.family(node.target)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if kind == "lift_fresh_copy":
            return None if storage(node) in self.world.written else self.arg(source)
        if str(node.target) == "aten.detach_.default":
            arg = self.arg(source)
            return None if self.world.needs_gradient(arg) else arg
        writes = bool(rules.written_arguments(node))  # dropout_ hands back what it wrote into
        nothing = not writes and rules.may_do_nothing(node.target) and same_tensor(node, source)
        return self.arg(source) if nothing or rules.is_idle_dropout(node) else None

    def _getitem(self, node: fx.Node) -> None:
        parent, index = cast("tuple[fx.Node, int]", node.args)
        if parent in self.opaque:
            name, call = self.opaque[parent]
            if call.single:
                self.env[node] = self._current(Ref(name))
                return
            index = call.slots.index(index)
        source = self.env[parent]
        if isinstance(source, tuple):  # a region's results, one by one
            self.env[node] = source[index]
            return
        name = cast("Ref", source).value
        self._take(node, name, index)

    def _take(self, node: fx.Node, parent: str, index: int) -> str:
        spec = self.world.specs[parent][index]
        where = place_of(node)
        name = self.add(
            Op(
                unique(node.name, self.world.names),
                "operator.getitem",
                (Ref(parent), index),
                outputs=(spec,) if spec else (),
                view_of=parent,
                **where,
            )
        )
        self.env[node] = Ref(name)
        return name

    def _op(self, node: fx.Node) -> None:
        target, written = node.target, rules.written_arguments(node)
        if isinstance(target, OpOverload) and rules.target_name(target).split(".")[0] not in _KNOWN:
            at, code = line_of(node.meta.get("stack_trace"))
            name = f"{target.namespace}::{target._opname}"
            raise inside(node, CUSTOM_OPERATOR.error(at, name=name, code=code))
        plain = self._plain_form(node, written)
        if plain is not None:
            written, target = [], plain
        where = place_of(node)
        path = where["modules"][-1].path if where["modules"] else ""
        args = tuple(self._at(self.arg(arg), path) for arg in node.args)
        kwargs = tuple((k, self._at(self.arg(v), path)) for k, v in kept_kwargs(node))
        everything = (*args, *(value for _, value in kwargs))
        needs = self.grad and rules.carries_gradient(target)
        needs = needs and any(self.world.needs_gradient(arg) for arg in everything)
        base = self.arg(written[0]) if written else None
        if isinstance(base, Ref):  # without gradient, too, an activation is what it was
            needs = needs or self.world.needs_gradient(base)
        specs = specs_of(node, needs)
        name = rules.target_name(target)
        view_of = self._owner(node) if plain is None or rules.returns_view(plain) else None
        if name == "aten.lift_fresh_copy.default":  # a constant that is written into: copy it first
            name, view_of = "aten.clone.default", None
        for entry in written:
            self._mark_written(entry, self.grad and any(map(self.world.needs_gradient, everything)))
        tensors = tuple(spec for spec in specs if spec is not None)
        made = self.add(
            Op(
                unique(tidy(node.name) if plain else node.name, self.world.names),
                name,
                args,
                kwargs,
                outputs=tensors,
                is_tuple=isinstance(node.meta.get("val"), list | tuple),
                random=rules.is_random(node),
                mutates=tuple(dict.fromkeys(self._root(self.arg(entry)) for entry in written)),
                view_of=view_of,
                **self._cost(name, everything, tensors, view_of is not None and base is None),
                **where,
            )
        )
        self.world.specs[made] = specs
        if plain is not None and not self._turns_a_view(node):
            self.renamed[cast("Ref", self.arg(node.args[0])).value] = made
        itself = isinstance(base, ParamRef) and not needs and same_tensor(node, written[0])
        self.env[node] = base if itself and base is not None else Ref(made)

    def _plain_form(self, node: fx.Node, written: list[fx.Node]) -> OpOverload | None:
        if len(written) != 1 or written[0] is not node.args[0]:
            return None
        if self._turns_a_view(node):
            return rules.plain_form(node, written[0].meta["val"], [])
        base = self.arg(written[0])
        if not isinstance(base, Ref) or base.value not in self.fresh or base.value in self.viewed:
            return None
        others = [n.meta["val"] for n in node.all_input_nodes if n is not written[0]]
        tensors = [value for value in others if isinstance(value, Tensor)]
        return rules.plain_form(node, written[0].meta["val"], tensors, self.autocast is not None)

    def _turns_a_view(self, node: fx.Node) -> bool:
        """Whether a call gives a tensor of forward's own another shape; views of it keep theirs.

        A buffer itself, and a buffer from `contiguous`, would have that shape in the next call,
        too.
        """
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not rules.turns_in_place(node.target):
            return False
        if isinstance(self.arg(source), ParamRef):
            return rules.family(source.target) == "detach"
        return source.op != "placeholder"

    def _mark_written(self, entry: fx.Node, needs: bool) -> None:
        arg = self.arg(entry)
        if isinstance(arg, Ref) and self._root(arg) in self.world.specs and needs:
            self.world.grown.add(self._root(arg))

    def _root(self, arg: Arg) -> str:
        name = name_of(arg) or ""
        return self.world.root.get(name, name)

    def _owner(self, node: fx.Node) -> str | None:
        """Name the argument that the call's result is a view of."""
        mine = storage(node)
        if mine is None:
            return None
        shared = next((n for n in node.all_input_nodes if storage(n) == mine), None)
        return None if shared is None else name_of(self.arg(shared))

    def _at(self, arg: Arg, path: str) -> Arg:
        """Name a tied parameter as the module that reads it does."""
        if isinstance(arg, ParamRef):
            return ParamRef(self.world.store.name_at(arg.param, path))
        return tuple(self._at(item, path) for item in arg) if isinstance(arg, tuple) else arg

    def _cost(
        self, target: str, args: tuple[Arg, ...], outputs: Sequence[TensorSpec], is_view: bool
    ) -> Cost:
        inputs = [spec for arg in args for spec in self._specs_of(arg)]
        reads, writes = moved(target, inputs, outputs, is_view)
        work = 0 if is_view else flops(target, inputs, outputs, args)
        return {"flops": work, "reads_bytes": reads, "writes_bytes": writes}

    def _specs_of(self, arg: Arg) -> list[TensorSpec]:
        if isinstance(arg, Ref):
            return [spec for spec in self.world.specs.get(arg.value, ()) if spec is not None]
        if isinstance(arg, ParamRef):
            return [spec_of(self.world.store.tensors[arg.param])]
        return (
            [spec for item in arg for spec in self._specs_of(item)]
            if isinstance(arg, tuple)
            else []
        )

    def add(self, op: Op) -> str:
        """Append an op; return its name."""
        self.ops.append(op)
        self.world.specs[op.name] = op.outputs
        owner = op.view_of
        self.world.root[op.name] = self.world.root.get(owner, owner) if owner else op.name
        if owner is None:
            self.fresh.add(op.name)
        else:
            self.viewed.add(owner)
        return op.name
