"""A torch.export program -> core.Graph: plain calls with names, sizes, costs and lines of source.

This file translates the program; `scope` translates the calls.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from bigbrain_fx.core import Arg, Graph, Input, Op, ParamRef, Ref
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation import rules
from bigbrain_fx.frontend.translation.batch import Batch, unique
from bigbrain_fx.frontend.translation.kept import KeptCall
from bigbrain_fx.frontend.translation.nodes import VALUE, spec_of, storage
from bigbrain_fx.frontend.translation.params import Store, store, tensor_names
from bigbrain_fx.frontend.translation.regions import without_dead
from bigbrain_fx.frontend.translation.scope import Scope, World
from bigbrain_fx.frontend.translation.snapshots import with_copies
from bigbrain_fx.frontend.translation.sources import inside

_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Labels:
    """Name and purpose of the graph; `is_fixed`, it is not tried with other sizes."""

    name: str
    rows: int
    training: bool
    autocast: str | None
    static_rows: int | None = None
    has_loss: bool = False
    output_names: tuple[str, ...] = ()
    is_fixed: bool = False


def translate(
    program: ExportedProgram,
    model: nn.Module,
    batch: Batch,
    whole: Mapping[str, KeptCall],
    labels: Labels,
) -> tuple[Graph, Store]:
    """Translate an exported step.

    Args:
        program: of a `Step` over `model`.
        model: the user's module.
        batch: the example batch, whose entries are the step's arguments in order.
        whole: opaque calls of the user's own Python, by the key in the trace.
        labels: name and purpose of the graph.

    Raises:
        CaptureError: the trace has shapes that depend on data, control flow of torch, or a write
            into an input that is also viewed.
    """
    taken = {*tensor_names(model), *(entry.name for entry in batch.entries)}
    names = _tensor_names(program, taken)
    kept = store(model, _constants(program, names))
    nodes = list(program.graph.nodes)
    without_empty_parts(nodes, _written(nodes))
    world = World(kept, whole, _written(nodes), {param.name for param in kept.params})
    scope = Scope(world, grad=labels.training, autocast=labels.autocast)
    inputs = _bind(scope, program, names, batch)
    scope.run(nodes)
    for node, arg in scope.env.items():
        if isinstance(arg, Ref):
            node.meta[VALUE] = arg.value
    results = _results(scope, cast("Sequence[object]", nodes[-1].args[0]))
    ops = with_grown(without_dead(scope.ops, results), world)
    ops = with_copies(ops, kept.params, world.names)
    _check_inputs_unwritten(ops, inputs)
    loss, outputs = (results[0], results[1:]) if labels.has_loss else (None, results)
    graph = Graph(
        labels.name,
        tuple(ops),
        inputs,
        kept.params,
        tuple(outputs),
        loss,
        batch=labels.rows,
        static_batch=labels.static_rows,
        training=labels.training,
        autocast=labels.autocast,
        output_names=tuple(zip(labels.output_names, outputs, strict=False)),
    )
    return graph, kept


def _tensor_names(program: ExportedProgram, taken: set[str]) -> dict[str, str]:
    """Name the trace's tensors as the user does; a constant gets another name than any input."""
    names = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in _TENSORS:
            continue
        name = inside(str(spec.target))
        constant = spec.kind is InputKind.CONSTANT_TENSOR
        names[spec.arg.name] = unique(_constant(name), taken) if constant else name
    return names


def _constant(name: str) -> str:
    """Name a constant that torch numbers over the model: equal layers have equal names."""
    return re.sub(r"(lifted_tensor|_tensor_constant)_?\d+$", "constant", name)


def _constants(program: ExportedProgram, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {
        names[spec.arg.name]: cast("Tensor", program.constants[str(spec.target)])
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }


def _written(nodes: Sequence[fx.Node]) -> frozenset[int]:
    """Number the storages that some call writes into; `detach_` writes no numbers."""
    found = [
        storage(entry)
        for node in nodes
        if node.op == "call_function" and rules.family(node.target) != "detach"
        for entry in rules.written_arguments(node)
    ]
    return frozenset(number for number in found if number is not None)


def _bind(
    scope: Scope, program: ExportedProgram, names: Mapping[str, str], batch: Batch
) -> tuple[Input, ...]:
    """Bind the placeholders to values; describe the inputs."""
    places = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    entries = iter(batch.entries)
    inputs = []
    for spec in program.graph_signature.input_specs:
        node = places[spec.arg.name]
        if spec.kind in _TENSORS:
            scope.env[node] = ParamRef(names[node.name])
            continue
        entry = next(entries)
        made = Input(entry.name, entry.key, spec_of(node.meta["val"], False), entry.batched)
        scope.world.specs[entry.name] = (made.spec,)
        scope.world.names.add(entry.name)
        scope.fresh.add(entry.name)
        scope.env[node] = Ref(entry.name)
        inputs.append(made)
    return tuple(inputs)


def _results(scope: Scope, results: Sequence[object]) -> list[str]:
    """Name the step's results; a parameter that is returned as it is becomes a value."""
    return [_value_name(scope, scope.arg(result)) for result in results if result is not None]


def _value_name(scope: Scope, arg: Arg) -> str:
    if isinstance(arg, Ref):
        return arg.value
    if not isinstance(arg, ParamRef):
        raise CaptureError(
            f"the model returns a constant, {arg}, where a tensor was expected", code="BX2183"
        )
    spec = scope.world.store.spec(arg.param)
    name = unique("output", scope.world.names)
    return scope.add(Op(name, "aten.alias.default", (arg,), outputs=(spec,), view_of=arg.param))


def _check_inputs_unwritten(ops: Sequence[Op], inputs: Sequence[Input]) -> None:
    names = {entry.name for entry in inputs}
    for op in ops:
        for name in op.mutates:
            if name in names:
                raise CaptureError(
                    f"the model writes into its input {name!r}: {op.code}",
                    code="BX2184",
                    at=op.source or None,
                    help="write into a copy: x = x.clone()",
                )


def with_grown(ops: Sequence[Op], world: World) -> list[Op]:
    """Mark values that got a gradient through a later write into them."""
    if not world.grown:
        return list(ops)
    return [
        replace(op, outputs=tuple(replace(s, requires_grad=True) for s in op.outputs))
        if world.root.get(op.name) in world.grown
        else op
        for op in ops
    ]


def without_empty_parts(nodes: Sequence[fx.Node], written: Collection[int]) -> None:
    """Leave tensors without elements out of `torch.cat`, in place; bodies of regions too.

    Args:
        nodes: of a trace.
        written: storages that some call writes into: such tensors stay.
    """
    for node in nodes:
        body = _body(node)
        if body is not None:
            without_empty_parts(list(body.graph.nodes), written)
        elif node.op == "call_function" and node.target is torch.ops.aten.cat.default:
            _simplify(node, written)


def _body(node: fx.Node) -> fx.GraphModule | None:
    found = getattr(node.graph.owning_module, str(node.target), None)
    return found if node.op == "get_attr" and isinstance(found, fx.GraphModule) else None


def _simplify(node: fx.Node, written: Collection[int]) -> None:
    parts = cast("Sequence[fx.Node]", node.args[0])
    left = [part for part in parts if not _is_empty(part)]
    kinds = {cast("Tensor", part.meta["val"]).dtype for part in parts}
    if len(left) == len(parts) or not left or len(kinds) > 1:  # cat promotes to a common dtype
        return
    if len(left) > 1:
        node.args = (left, *node.args[1:])
    elif not {storage(node), storage(left[0])} & set(written):
        _copy(node, left[0])


def _is_empty(node: fx.Node) -> bool:
    """Whether it is a vector of no elements, which `torch.cat` skips beside any shape."""
    return tuple(cast("Tensor", node.meta["val"]).shape) == (0,)


def _copy(node: fx.Node, source: fx.Node) -> None:
    """Make a node a copy of another; replace it where a copy would be indistinguishable."""
    new, old = spec_of(node.meta["val"], False), spec_of(source.meta["val"], False)
    if new.strides == old.strides:
        node.replace_all_uses_with(source)
    elif cast("Tensor", node.meta["val"]).is_contiguous():
        node.target, node.args, node.kwargs = torch.ops.aten.contiguous.default, (source,), {}
