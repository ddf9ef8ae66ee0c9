"""What a person would call each value: its variable in the model's source, or its layer.

This room suggests; `names.py` makes the names unique, and `function.py` says which are free.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from bigbrain_fx.core import Graph, ModuleCall, Op
from bigbrain_fx.emit.names import identifier
from bigbrain_fx.units import is_size


def value_names(graph: Graph) -> Mapping[str, str]:
    """Suggest an identifier for every value of a graph; several values may get the same one."""
    names = {entry.name: identifier(entry.name) for entry in graph.inputs}
    assigned = assigned_names(graph)
    for op in graph.ops:
        names[op.name] = assigned.get(op.name) or _by_layer(op) or _by_target(op, names)
    return names


def assigned_names(graph: Graph) -> dict[str, str]:
    """Name the last op of a source line after the variable that the line assigns."""
    lines: dict[tuple[ModuleCall | None, str], list[Op]] = defaultdict(list)
    for op in graph.ops:
        if op.code:
            lines[_owner(op), op.source].append(op)
    names: dict[str, str] = {}
    for ops in lines.values():
        targets = _targets(ops[-1].code)
        last = [op for op in ops if not is_size(op)][-len(targets) :] if targets else []
        if len(targets) == 1 and last:
            names[last[0].name] = targets[0]
        elif (
            len(targets) > 1
            and len(last) == len(targets)
            and all(op.target == "operator.getitem" for op in last)
        ):
            names.update(zip((op.name for op in last), targets, strict=True))
    return names


def _owner(op: Op) -> ModuleCall | None:
    """Return the innermost module that is not torch's own: its forward holds the source line."""
    return next((call for call in reversed(op.modules) if not call.type.startswith("torch.")), None)


@lru_cache(maxsize=8192)
def _targets(code: str) -> tuple[str, ...]:
    try:
        body = ast.parse(code).body
    except SyntaxError:  # the first or last line of a longer statement
        return ()
    match body:
        case [ast.Assign(targets=[ast.Name(id=name)])]:
            return (identifier(name),)
        case [ast.AugAssign(target=ast.Name(id=name))] | [ast.AnnAssign(target=ast.Name(id=name))]:
            return (identifier(name),)
        case [ast.Assign(targets=[ast.Tuple(elts=elements)])]:
            found = [e.id for e in elements if isinstance(e, ast.Name)]
            return tuple(map(identifier, found)) if len(found) == len(elements) else ()
    return ()


def _by_layer(op: Op) -> str | None:
    """Name the result of a torch layer after the layer's attribute: `qkv` for `self.qkv(x)`."""
    if not op.modules or not op.modules[-1].type.startswith("torch."):
        return None
    attribute = op.modules[-1].path.rpartition(".")[2]
    return None if attribute.isdigit() or not attribute else identifier(attribute)


def _by_target(op: Op, names: Mapping[str, str]) -> str:
    if is_size(op):
        return "batch" if op.target == "aten.sym_size.int" else "size"
    if op.target == "operator.getitem" and op.refs:
        return names[op.refs[0]]
    parts = op.target.split(".")
    return identifier(parts[1] if parts[0] == "aten" else parts[-1])
