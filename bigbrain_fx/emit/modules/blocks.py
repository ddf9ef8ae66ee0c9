"""Calls that get a class: calls that repeat, and calls of the author's own modules.

    Body of each stage ──equal key──▶ Template, one class ──numbers that differ──▶ its arguments

Two calls share a class when they are of one type and run the same calls on the same wiring. Where
only numbers differ (channels, strides), the numbers become arguments of the class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from bigbrain_fx.core import Arg, Const, Dim, Graph, ModuleCall, Op, ParamRef, Ref, Stage
from bigbrain_fx.emit.modules.merging import merged
from bigbrain_fx.emit.modules.nesting import CallFacts, Nesting, gather_facts
from bigbrain_fx.emit.ops.items import (
    BlockCall,
    Body,
    Item,
    LayerCall,
    SequentialCall,
    Signature,
    all_blocks,
    blocks_in,
    gives_of,
    is_below,
    layers_in,
)
from bigbrain_fx.emit.ops.scope import make_body, with_sizes

MIN_OPS_ONCE = 3  # what occurs once and is shorter is written where it is called
MAX_TRIES = 4  # each bans modules that cannot be written in one way
Where: TypeAlias = tuple[str | int, ...]
"""The place of a number: (item's index, argument path ...) or ("param", name)."""
Number: TypeAlias = int | float | tuple[Dim, ...]
"""What may vary between uses of a class: a literal, or the shape of a parameter."""


@dataclass
class Keys:
    """Keys of bodies: equal for those that can share a class."""

    graph: Graph
    again: frozenset[str] = frozenset()
    known: dict[object, int] = field(default_factory=dict)
    items: dict[int, list[Item]] = field(default_factory=dict)
    kept: list[Body] = field(default_factory=list)

    def key(self, body: Body, module: ModuleCall) -> Signature:
        """Return the key of a body: all but its numbers."""
        structure = (module.type, len(body.takes), *self.structure(body))
        return (module.type, self.known.setdefault(structure, len(self.known)))

    def full(self, body: Body) -> list[Item]:
        """Return a body's items with the sizes it reads."""
        if id(body) not in self.items:
            self.items[id(body)] = with_sizes(self.graph, body)
            self.kept.append(body)  # so that no other body gets its id
        return self.items[id(body)]

    def structure(self, body: Body) -> tuple[object, ...]:
        """Return what a body calls, on what; values from outside are ("outside", place)."""
        items = self.full(body)
        labels: dict[str, object] = {name: ("outside", i) for i, name in enumerate(body.takes)}
        for i, item in enumerate(items):
            labels.update({name: (i, j) for j, name in enumerate(gives_of(item))})
        writer = _Skeleton(self.graph, body, labels, again=self.again)
        calls = tuple(writer.item(item) for item in items)
        gives = tuple(labels[name] for name in body.gives)
        return calls, len(body.outer_params), gives


@dataclass(frozen=True)
class _Skeleton:
    """Write items without names and numbers; `exact` keeps the numbers, which then cannot vary.

    Items that run `again` are written in another way than items whose results are saved.
    """

    graph: Graph
    body: Body
    labels: Mapping[str, object]
    exact: bool = False
    again: frozenset[str] = frozenset()

    def item(self, item: Item) -> object:
        match item:
            case Op():
                return self.op(item)
            case LayerCall():
                layer = item.layer
                words = tuple((n, _word(v)) for n, v in (*layer.args, *layer.options))
                given = tuple(self.arg(arg) for arg in item.inputs)
                path = self.body.relative(item.module.path)
                made = item.op.random, item.returned, item.op.name in self.again
                return "layer", path, layer.name, words, layer.frozen, given, *made
            case BlockCall():
                path = self.body.relative(item.module.path)
                outer = tuple(self.param(name) for name in item.body.outer_params)
                return "block", path, item.key, tuple(self.labels[n] for n in item.takes), outer
        return "sequence", *(self.step(step) for step in item.steps), self.labels[item.takes[0]]

    def step(self, step: LayerCall | BlockCall) -> object:
        if isinstance(step, BlockCall):
            return step.key
        words = tuple((n, _word(v)) for n, v in (*step.layer.args, *step.layer.options))
        return step.layer.name, words, step.layer.frozen, step.op.name in self.again

    def op(self, op: Op) -> object:
        kwargs = tuple((name, self.arg(value)) for name, value in op.kwargs)
        inner = self.region(op.body) if op.body else None
        again = op.name in self.again
        return op.target, tuple(self.arg(arg) for arg in op.args), kwargs, op.random, inner, again

    def region(self, body: Graph) -> object:
        own = {op.name: ("inner", i) for i, op in enumerate(body.ops)}
        inside = replace(self, labels={**self.labels, **own}, exact=True)
        outputs = tuple(inside.labels.get(name, name) for name in body.outputs)
        return tuple(inside.op(op) for op in body.ops), outputs

    def arg(self, arg: Arg) -> object:
        match arg:
            case Ref(value=value):
                return self.labels.get(value, value)
            case ParamRef(param=name):
                return self.param(name)
            case Const(const=const):
                return "const", const
            case tuple():
                return tuple(self.arg(item) for item in arg)
            case bool() | str() | None:
                return "literal", arg
        return ("number", repr(arg)) if self.exact else ("number",)

    def param(self, name: str) -> object:
        param = self.graph.param[name]
        kind = param.kind, param.spec.dtype, param.spec.requires_grad, len(param.spec.shape)
        if is_below(name, self.body.path):
            return "param", self.body.relative(name), kind
        return "outer", self.body.outer_params.index(name), kind


def _word(value: Arg) -> object:
    """Return a constructor's argument without its numbers."""
    if isinstance(value, tuple):
        return tuple(map(_word, value))
    return value if isinstance(value, bool | str | Const) or value is None else "number"


@dataclass(frozen=True)
class Template:
    """One class of the bundle: the call it is written from, and the numbers that vary.

    `varying` groups the places that hold equal numbers in every use: they share an argument.
    """

    key: Signature
    model: BlockCall
    varying: tuple[tuple[Where, ...], ...]
    is_shared: bool
    uses: tuple[BlockCall, ...]

    @property
    def module(self) -> str:
        """The qualified name of the user's class."""
        return self.model.module.type


@dataclass(frozen=True)
class Blocks:
    """The forward of every stage, and the classes that they call, in order of first use.

    Inner classes come before the classes that use them.
    """

    bodies: tuple[Body, ...]
    templates: Mapping[Signature, Template]
    keys: Keys

    def used(self, body: Body) -> list[Signature]:
        """Return the keys of all classes that a body needs, inner ones first."""
        found = {block.key for block in all_blocks(body.items)}
        return [key for key in self.templates if key in found]


def find_blocks(
    graph: Graph,
    stages: Sequence[Stage],
    results: Sequence[Sequence[str]],
    places: Mapping[str, tuple[str, int]],
) -> Blocks:
    """Nest every stage and decide which calls get a class.

    Args:
        graph: as captured.
        stages: all of them.
        results: each stage's values that other stages or the caller use.
        places: random op -> (module path, how many draws of that module came before).
    """
    again = frozenset(name for stage in stages for name in stage.again)
    keys, facts = Keys(graph, again), gather_facts(graph, stages, places)
    bodies = [
        _settled(keys, facts, stage, frozenset(given))
        for stage, given in zip(stages, results, strict=True)
    ]
    chosen = _chosen(bodies)
    bodies = merged(keys, [_kept(graph, keys, body, chosen) for body in bodies])
    uses: dict[Signature, list[BlockCall]] = defaultdict(list)
    for body in bodies:
        for block in all_blocks(body.items):
            uses[block.key].append(block)
    templates = {key: _template(keys, key, same) for key, same in uses.items()}
    return Blocks(tuple(bodies), templates, keys)


def _settled(keys: Keys, facts: CallFacts, stage: Stage, results: frozenset[str]) -> Body:
    """Nest a stage; a module whose calls differ from each other is written out."""
    banned: frozenset[str] = frozenset()
    for _ in range(MAX_TRIES):
        body = Nesting(facts, stage, results, banned, keys.key).body()
        clashing = _clashing(keys, body)
        if not clashing:
            return body
        banned |= clashing
    every = {module.path for name in stage.ops for module in facts.graph.op[name].modules}
    return Nesting(facts, stage, results, frozenset(every), keys.key).body()


def _clashing(keys: Keys, body: Body) -> frozenset[str]:
    """Return the modules that would need to be made in two ways."""
    ways: dict[str, set[str]] = defaultdict(set)
    for block in all_blocks(body.items):
        ways[block.module.path].add(f"{block.key} {list(numbers(keys, block.body).values())}")
    for item in layers_in(body.items):
        ways[item.module.path].add(repr(item.layer))
    return frozenset(path for path, found in ways.items() if len(found) > 1)


def _chosen(bodies: Sequence[Body]) -> frozenset[Signature]:
    """Return the keys that get a class: those that repeat, and what occurs once and is no stack."""
    blocks = [block for body in bodies for block in all_blocks(body.items)]
    count = Counter(block.key for block in blocks)
    return frozenset(
        block.key
        for block in blocks
        if count[block.key] > 1
        or (len(block.body.ops) >= MIN_OPS_ONCE and not _is_stack(block.body))
    )


def _is_stack(body: Body) -> bool:
    """Whether a module holds layers that repeat: its forward is a part of its stage's."""
    numbered = Counter(
        block.key
        for block in all_blocks(body.items)
        if block.module.path.rpartition(".")[2].isdigit()
    )
    return any(times > 1 for times in numbered.values())


def _kept(graph: Graph, keys: Keys, body: Body, chosen: frozenset[Signature]) -> Body:
    """Write the other calls out in place."""
    items = tuple(part for item in body.items for part in _inlined(graph, keys, item, chosen))
    return replace(body, items=items)


def _inlined(
    graph: Graph, keys: Keys, item: Item, chosen: frozenset[Signature]
) -> tuple[Item, ...]:
    if isinstance(item, SequentialCall):
        steps = tuple(part for step in item.steps for part in _inlined(graph, keys, step, chosen))
        whole = len(steps) == len(item.steps) and not any(
            isinstance(s, Op) or (isinstance(s, LayerCall) and s.op.name in keys.again)
            for s in steps
        )
        return (SequentialCall(item.module, steps),) if whole else steps  # type: ignore[arg-type]
    if not isinstance(item, BlockCall):
        return (item,)
    body = _kept(graph, keys, item.body, chosen)
    if item.key not in chosen:
        return body.items
    found = make_body(
        graph,
        body.items,
        set(body.gives),
        path=body.path,
        call=body.call,
        depth=body.depth,
        takes=body.takes,
    )
    found = replace(found, gives=body.gives)
    return (BlockCall(item.module, found, keys.key(found, item.module)),)


def _template(keys: Keys, key: Signature, same: Sequence[BlockCall]) -> Template:
    tables = [numbers(keys, block.body) for block in same]
    columns: dict[tuple[str, ...], list[Where]] = defaultdict(list)
    for where in tables[0]:
        column = tuple(repr(table[where]) for table in tables)
        if len(set(column)) > 1:
            columns[column].append(where)
    shared = any(block.module.call for block in same)
    model = max(same, key=lambda block: len(set(block.takes)))  # it is handed nothing twice
    uses = (model, *(block for block in same if block is not model))
    return Template(key, model, tuple(map(tuple, columns.values())), shared, uses)


def numbers(keys: Keys, body: Body) -> dict[Where, Number]:
    """Return every number in a body by its place: literals, shapes, arguments of layers."""
    found: dict[Where, Number] = {}
    own: dict[str, None] = {}
    for i, item in enumerate(keys.full(body)):
        for where, value in _item_numbers(keys, item):
            found[i, *where] = value
        read = item.params if isinstance(item, Op) else ()
        read = item.body.outer_params if isinstance(item, BlockCall) else read  # it is given them
        own.update(dict.fromkeys(name for name in read if is_below(name, body.path)))
    for name in own:
        found["param", body.relative(name)] = keys.graph.param[name].spec.shape
    return found


def _item_numbers(keys: Keys, item: Item) -> Iterator[tuple[Where, Number]]:
    match item:
        case Op():
            literals = _literals((item.args, tuple(v for _, v in item.kwargs)))
        case LayerCall():
            literals = (
                ((name, *where), value)
                for name, arg in (*item.layer.args, *item.layer.options)
                for where, value in _literals(arg)
            )
        case BlockCall():
            yield from numbers(keys, item.body).items()
            return
        case SequentialCall():
            for i, step in enumerate(item.steps):
                for where, number in _item_numbers(keys, step):
                    yield (i, *where), number
            return
    for where, value in literals:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield where, value


def _literals(arg: Arg, path: Where = ()) -> Iterator[tuple[Where, Arg]]:
    if isinstance(arg, tuple):
        for i, item in enumerate(arg):
            yield from _literals(item, (*path, i))
    else:
        yield path, arg


def inner_blocks(body: Body) -> Iterator[tuple[BlockCall, int, int]]:
    """Yield the calls of classes in a body, each with its number among those of its module."""
    found = list(blocks_in(body.items))
    total = Counter(block.module.path for block in found)
    seen: Counter[str] = Counter()
    for block in found:
        yield block, seen[block.module.path], total[block.module.path]
        seen[block.module.path] += 1
