"""Regions of a trace (no_grad, enable_grad, autocast): one op with a body, never cut inside.

A region without an effect at its place (autocast off where it is not on, or to the same type) is
dissolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from torch import fx

from bigbrain_fx.core import Arg, Const, Graph, Input, Op, Ref, TensorSpec, plus
from bigbrain_fx.frontend.translation.batch import unique
from bigbrain_fx.frontend.translation.nodes import literal, place_of
from bigbrain_fx.frontend.translation.sources import line_of
from bigbrain_fx.frontend.translation.trace_refusals import CONTROL_FLOW

if TYPE_CHECKING:
    from bigbrain_fx.frontend.translation.scope import Scope


AUTOCAST = "region.autocast"


def translate_region(scope: Scope, node: fx.Node) -> None:
    """Translate a region's call; its results are then known to `scope.env`."""
    kind, options, module, args = _read(node)
    outer = [scope.arg(arg) for arg in args]
    nodes = list(module.graph.nodes)
    places = [entry for entry in nodes if entry.op == "placeholder"]
    casts = type_of(options) if kind == AUTOCAST else scope.autocast
    inner = scope if _changes_nothing(scope, kind, casts) else scope.inside(kind, casts)
    inner.env.update(zip(places, outer, strict=True))
    inner.run(nodes)
    found = tuple(inner.arg(result) for result in cast("Sequence[object]", nodes[-1].args[0]))
    scope.env[node] = found if inner is scope else _close(scope, node, kind, options, inner, found)


def _read(node: fx.Node) -> tuple[str, dict[str, Arg], fx.GraphModule, tuple[object, ...]]:
    """Take a region's call apart: its kind, options, body and arguments."""
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *args = node.args
        kind = "region.enable_grad" if enabled else "region.no_grad"
        return kind, {}, _body(node, body), tuple(args)
    if name == "wrap_with_autocast":
        _device, dtype, enabled, _cache, body, *args = node.args
        options = {"dtype": literal(dtype), "enabled": literal(enabled)}
        return AUTOCAST, options, _body(node, body), tuple(args)
    at, code = line_of(node.meta.get("stack_trace"))
    raise CONTROL_FLOW.error(at, code=f"{name}: {code}")


def _body(node: fx.Node, body: object) -> fx.GraphModule:
    assert isinstance(body, fx.Node)
    return cast("fx.GraphModule", getattr(node.graph.owning_module, str(body.target)))


def type_of(options: Mapping[str, Arg]) -> str | None:
    """Return the type that a region of autocast casts to, by torch's name; None where it is off."""
    dtype = options["dtype"]
    name = dtype.const if isinstance(dtype, Const) else "torch's own"
    return name.removeprefix("torch.") if options["enabled"] else None


def _changes_nothing(scope: Scope, kind: str, casts: str | None) -> bool:
    if kind == AUTOCAST:
        return scope.autocast == casts
    return (kind == "region.enable_grad") == scope.grad


def _close(
    scope: Scope,
    node: fx.Node,
    kind: str,
    options: dict[str, Arg],
    inner: Scope,
    found: tuple[Arg, ...],
) -> tuple[Arg, ...]:
    """Make one op of a body; return the values of its results outside."""
    made = {op.name for op in inner.ops}
    wanted = list(dict.fromkeys(a.value for a in found if isinstance(a, Ref) and a.value in made))
    ops = without_dead(inner.ops, wanted)
    specs = [spec for value in wanted for spec in scope.world.specs[value]]
    region = scope.add(_region_op(scope, node, kind, options, ops, wanted))
    scope.world.specs[region] = tuple(specs)
    scope.fresh.discard(region)
    taken = {value: _take(scope, region, i, value, ops) for i, value in enumerate(wanted)}
    return tuple(
        Ref(taken[a.value]) if isinstance(a, Ref) and a.value in taken else a for a in found
    )


def _region_op(
    scope: Scope,
    node: fx.Node,
    kind: str,
    options: dict[str, Arg],
    ops: Sequence[Op],
    wanted: Sequence[str],
) -> Op:
    name = unique(kind.removeprefix("region."), scope.world.names)
    here = {op.name for op in ops}
    outside = list(dict.fromkeys(ref for op in ops for ref in op.refs if ref not in here))
    inputs = tuple(_input(scope, value) for value in outside)
    first = next((op for op in ops if op.source), None)
    specs = [spec for value in wanted for spec in scope.world.specs[value] if spec is not None]
    return Op(
        name,
        kind,
        tuple(Ref(value) for value in outside),
        tuple(options.items()),
        outputs=tuple(specs),
        is_tuple=True,
        modules=place_of(node)["modules"],
        source=first.source if first else "",
        code=first.code if first else "",
        lines=first.lines if first else (),
        random=any(op.random for op in ops),
        mutates=tuple(dict.fromkeys(n for op in ops for n in op.mutates if n not in here)),
        flops=plus(*[op.flops for op in ops]),
        reads_bytes=plus(*[op.reads_bytes for op in ops]),
        writes_bytes=plus(*[op.writes_bytes for op in ops]),
        body=Graph(name, tuple(ops), inputs, (), tuple(wanted), None),
    )


def _input(scope: Scope, name: str) -> Input:
    """Describe a body's input; it has the name of the value outside."""
    spec = next((s for s in scope.world.specs[name] if s is not None), TensorSpec((), "int64", ()))
    return Input(name, (), spec, batched=False)


def _take(scope: Scope, region: str, index: int, value: str, ops: Sequence[Op]) -> str:
    """Add the op that takes one result of a region; return its name."""
    here = {op.name: op for op in ops}
    op, root = here[value], scope.world.root[value]
    spec = scope.world.specs[region][index]
    return scope.add(
        Op(
            unique(f"{region}_{value}", scope.world.names),
            "operator.getitem",
            (Ref(region), index),
            outputs=(spec,) if spec else (),
            modules=op.modules,
            source=op.source,
            code=op.code,
            lines=op.lines,
            view_of=region if root in here else root,
        )
    )


def without_dead(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """Drop ops without readers; checks, random draws and writes stay."""
    live = set(wanted)
    kept = []
    for op in reversed(ops):
        if op.name in live or op.mutates or op.random or op.checks:
            live.update(op.refs)
            kept.append(op)
    return kept[::-1]
