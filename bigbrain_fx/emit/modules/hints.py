"""Readable names of values: their variables in the model's source, or their layers.

A value that leaves a statement gets the name that the statement assigns. Of nested statements (a
helper called from `forward`) the outermost counts, of nested modules the innermost. The module
suggests names; `variables` says which are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from bigbrain_fx.core import Graph, ModuleCall, Op, Ref
from bigbrain_fx.emit.modules.names import identifier
from bigbrain_fx.emit.modules.statements import IGNORED, operand, size_target, targets
from bigbrain_fx.emit.ops.items import Body, Item, LayerCall, gives_of, takes_of
from bigbrain_fx.planning import is_size

Frame: TypeAlias = tuple[ModuleCall | None, int, str]
"""A line that was running: the module call whose code it is, how deep in it, the place."""

MAX_GUESSED = 2  # names of a statement of which one is a tensor's: the first, most likely


@dataclass(frozen=True)
class Hints:
    """Suggestions for every value of a body.

    Attributes:
        names: value -> identifier; several values may have the same one.
        assigned_to: value -> variable, for those that the source assigns.
    """

    names: Mapping[str, str]
    assigned_to: Mapping[str, str]

    @property
    def assigned(self) -> frozenset[str]:
        """Values that the source assigns to a variable."""
        return frozenset(self.assigned_to)


def value_names(graph: Graph) -> Hints:
    """Suggest an identifier for every value of a graph, whatever function it ends up in."""
    whole = Body("", 0, -1, graph.ops, tuple(graph.input), (), graph.outputs)
    return hints(graph, whole, {}, None)


def hints(graph: Graph, body: Body, known: Mapping[str, str], ever: Hints | None) -> Hints:
    """Suggest names for the values that a body makes.

    Args:
        graph: as captured.
        body: one function's.
        known: names of its arguments.
        ever: hints for the whole graph: where a cut runs through a statement, its first half
            assigns nothing. None when the body is the whole graph.
    """
    statements = dict(graph.statements)
    assigned = {
        value: name
        for value, name in _assigned(graph, body, statements).items()
        if ever is None or value in ever.assigned_to
    }
    names = {name: identifier(name) for name in graph.input} | dict(known)
    for op in graph.ops:
        if is_size(op):
            names[op.name] = _size_name(op, statements)
    for item in body.items:
        if isinstance(item, Op) and item.body is not None:
            inner = replace(body, items=item.body.ops, gives=item.body.outputs)
            found = hints(graph, inner, names, ever)
            names, assigned = {**names, **found.names}, {**found.assigned_to, **assigned}
        for value in gives_of(item) if not (isinstance(item, Op) and is_size(item)) else ():
            outside = ever.assigned_to.get(value) if ever and value in body.gives else None
            names[value] = assigned.get(value) or _fallback(
                graph, item, value, names, ever, outside
            )
    return Hints(names, assigned)


# --------------------------------------------------------------------------- assigned variables


def _assigned(graph: Graph, body: Body, statements: Mapping[str, str]) -> dict[str, str]:
    """Return the variable of each value that leaves a statement which assigns it."""
    returned: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, call in enumerate(graph.arguments):
        for place, value in enumerate(call.results):
            returned[value].append((number, place))
    readers: dict[str, set[int]] = defaultdict(set)
    for i, item in enumerate(body.items):
        for value in takes_of(item):
            readers[value].add(i)
    found: dict[str, tuple[tuple[int, int], str]] = {}
    for frame, rank, run in _runs(body):
        wanted = targets(statements.get(frame[2], "") or _code(body.items[run[0]], frame))
        for value, name in _pairs(wanted, run, body, readers, returned):
            if value not in found or found[value][0] < rank:
                found[value] = (rank, name)
    return {value: name for value, (_, name) in found.items()}


def _code(item: Item, frame: Frame) -> str:
    """Return the text of an op's own line, where the statement is not known."""
    op = item if isinstance(item, Op) else None
    return op.code if op is not None and op.source == frame[2] else ""


def _runs(body: Body) -> Iterator[tuple[Frame, tuple[int, int], range]]:
    """Yield each run of items that one statement covers, with the rank of the names it gives."""
    paths = [_frames(item, body.depth) for item in body.items]
    deepest = max((len(path) for path in paths), default=0)
    for length in range(1, deepest + 1):
        start = 0
        while start < len(paths):
            prefix = paths[start][:length]
            if len(prefix) < length:
                start += 1
                continue
            stop = _turn_end(body.items, paths, start, prefix)
            module, inner, _ = prefix[-1]
            depth = next(i for i, frame in enumerate(prefix) if frame[0] == module)
            yield prefix[-1], (depth, -inner), range(start, stop)
            start = stop


def _frames(item: Item, depth: int) -> tuple[Frame, ...]:
    """Return the lines that lead from a function's own code to an item, outermost first."""
    op = item if isinstance(item, Op) else item.ops[-1]
    if len(op.lines) <= len(op.modules) and isinstance(item, Op):
        owner = next((m for m in reversed(op.modules) if not m.type.startswith("torch.")), None)
        return ((owner, 0, op.source),) if op.source else ()
    last = len(op.modules) if isinstance(item, Op) else op.modules.index(item.module)
    return tuple(
        (op.modules[k - 1] if k else None, i, place)
        for k in range(depth + 1, last + 1)
        for i, place in enumerate(op.lines[k] if k < len(op.lines) else ())
    )


def _turn_end(
    items: Sequence[Item], paths: Sequence[tuple[Frame, ...]], start: int, prefix: tuple[Frame, ...]
) -> int:
    """Return where a statement's run ends: at another statement, or where a loop turns."""
    seen: dict[str, object] = {}
    before: int | None = None  # items of a turn before its first module
    stop = start
    while stop < len(paths) and paths[stop][: len(prefix)] == prefix:
        child = _child(items[stop], prefix[-1])
        if child is not None:
            parent, _, last = child.path.rpartition(".")
            before = stop - start if before is None else before
            turn = (last, child.call)
            if last.isdigit() and seen.setdefault(parent, turn) != turn:
                return max(stop - before, start + 1)
        stop += 1
    return stop


def _child(item: Item, frame: Frame) -> ModuleCall | None:
    """Return the module that a statement calls to run an item."""
    op = item if isinstance(item, Op) else item.ops[0]
    depth = op.modules.index(frame[0]) + 1 if frame[0] in op.modules else 0
    return next((module for module in op.modules[depth:] if module.path), None)


def _as_returned(
    values: Sequence[str], returned: Mapping[str, Sequence[tuple[int, int]]]
) -> list[str]:
    """Put values in the order in which one call returned them all, if one did."""
    calls = [dict(returned.get(value, ())) for value in values]
    common = set(calls[0]).intersection(*calls[1:]) if calls else set()
    if not common:
        return list(values)
    number = max(common)
    places = {value: call[number] for value, call in zip(values, calls, strict=True)}
    return sorted(values, key=lambda value: places[value])


def _pairs(
    wanted: Sequence[str],
    run: range,
    body: Body,
    readers: Mapping[str, set[int]],
    returned: Mapping[str, Sequence[tuple[int, int]]],
) -> Iterator[tuple[str, str]]:
    """Pair the values that leave a run of items with the names that its statement assigns."""
    if not wanted:
        return
    made = {value: i for i in run for value in gives_of(body.items[i])}
    last = body.items[run[-1]]
    leaving = [v for v in made if v in body.gives or readers[v] - set(run)]
    leaving = _as_returned(leaving or gives_of(last), returned)
    items = [body.items[made[value]] for value in leaving]
    parts = [item for item in items if isinstance(item, Op) and _is_part(item)]
    named = [name for name in wanted if name != IGNORED]
    if len(wanted) > 1 and len(parts) == len(leaving) and len({p.args[0] for p in parts}) == 1:
        taken = [body.items[i] for i in run]
        for part in (p for p in taken if isinstance(p, Op) and _is_part(p)):
            index = part.args[1] if part.args[0] == parts[0].args[0] else None
            if isinstance(index, int) and index < len(wanted) and wanted[index] != IGNORED:
                yield part.name, wanted[index]
    elif len(leaving) == len(wanted):
        yield from ((v, n) for v, n in zip(leaving, wanted, strict=True) if n != IGNORED)
    elif len(leaving) == len(named):
        yield from zip(leaving, named, strict=True)
    elif len(leaving) == 1 and 1 <= len(named) <= MAX_GUESSED:
        yield leaving[0], named[0]


def _is_part(op: Op) -> bool:
    return op.target == "operator.getitem"


def alias(graph: Graph, reader: Op, value: str) -> str | None:
    """Return what a later statement calls a value whose variable is overwritten before it.

    `residual = x` computes nothing, so no graph has it; `x = residual + x` tells.
    """
    statements = dict(graph.statements)
    side = next((i for i, arg in enumerate(reader.args[:2]) if arg == Ref(value)), None)
    if side is None:
        return None
    kind = reader.target.split(".")[1] if "." in reader.target else reader.target
    for frames in reversed(reader.lines):
        for place in reversed(frames):
            found = operand(statements.get(place, ""), kind, side)
            if found:
                return found
    return None


# --------------------------------------------------------------------------- not assigned


def _fallback(
    graph: Graph,
    item: Item,
    value: str,
    names: Mapping[str, str],
    ever: Hints | None,
    outside: str | None,
) -> str:
    """Name a value after its layer, what its caller calls what it is given, or its op."""
    if isinstance(item, Op):
        found = _by_layer(item) or _by_region(graph, item, names) or outside
        return found or _by_target(item, names)
    if isinstance(item, LayerCall) or len(gives_of(item)) == 1:
        return _by_path(item.module.path) or _by_target(item.ops[-1], names)
    known = ever.names.get(value) if ever else None
    return known or _by_target(graph.op[value], names)


def _by_region(graph: Graph, op: Op, names: Mapping[str, str]) -> str | None:
    """Name what a region leaves as it is called inside."""
    region = graph.op.get(op.refs[0]) if _is_part(op) and op.refs else None
    if region is None or region.body is None:
        return None
    return names.get(region.body.outputs[int(str(op.args[1]))])


def _by_layer(op: Op) -> str | None:
    """Name the result of a torch layer after the layer's attribute: `qkv` for `self.qkv(x)`."""
    if not op.modules or not op.modules[-1].type.startswith("torch."):
        return None
    attribute = op.modules[-1].path.rpartition(".")[2]
    return None if attribute.isdigit() or not attribute else identifier(attribute)


def _by_path(path: str) -> str | None:
    """Name the result of a module after its attribute: "blocks.3" gives `block`."""
    parts = path.split(".")
    words = [part for part in parts if not part.isdigit()]
    if not words:
        return None
    numbered = parts[-1].isdigit() and words[-1].endswith("s") and len(words[-1]) > 2
    return identifier(words[-1][:-1] if numbered else words[-1])


def _by_target(op: Op, names: Mapping[str, str]) -> str:
    if _is_part(op) and op.refs:
        return names.get(op.refs[0]) or "part"
    parts = op.target.split(".")
    if parts[0] in ("aten", "library"):
        return identifier(parts[1 if parts[0] == "aten" else 2])
    own = parts[-1]  # the user's own class or module keeps its name, so its result has another
    return identifier(own.lower() if own.lower() != own else f"{own}_result")


def _size_name(op: Op, statements: Mapping[str, str]) -> str:
    """Name a size after the variable that holds it: `batch, length = x.shape`."""
    if op.target != "aten.sym_size.int":
        return "size"
    for frames in reversed(op.lines):
        for place in frames:
            name = size_target(statements.get(place, ""), int(str(op.args[1])))
            if name:
                return name
    return "batch"
