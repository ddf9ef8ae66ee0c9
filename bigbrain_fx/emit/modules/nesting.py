"""A stage's ops -> calls inside calls, as the model's author nested its modules.

    ops ──by module stack──▶ runs of one call ──▶ LayerCall, SequentialCall, BlockCall, else inline

A call becomes a class when all of it is on the stage, and the tensors below it are its alone. This
module decides what can be a class; `blocks` decides what is worth one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from bigbrain_fx.core import Graph, ModuleCall, Op, Stage
from bigbrain_fx.emit.modules.kept import leaf_path
from bigbrain_fx.emit.ops.items import (
    BlockCall,
    Body,
    Item,
    LayerCall,
    SequentialCall,
    Signature,
    blocks_in,
    gives_of,
    is_below,
    ops_of,
    params_of,
)
from bigbrain_fx.emit.ops.layers import layer_call
from bigbrain_fx.emit.ops.recurrent import recurrent_call
from bigbrain_fx.emit.ops.scope import NoSizeError, make_body, with_sizes
from bigbrain_fx.planning import is_size

CONTAINERS = "torch.nn.modules.container."
MIN_ITEMS = 2  # a class of less would only pass its argument on


@dataclass(frozen=True)
class CallFacts:
    """Facts of module calls that hold for all stages.

    Attributes:
        total: number of ops of each module call on all stages together.
        places: random op -> (module path, how many draws of that module came before).
        parameters: (module path, call) -> value -> parameter of its `forward`.
        results: (module path, call) -> values that its `forward` returned, in order.
    """

    graph: Graph
    total: Mapping[ModuleCall, int]
    places: Mapping[str, tuple[str, int]]
    parameters: Mapping[tuple[str, int], Mapping[str, str]]
    results: Mapping[tuple[str, int], tuple[str, ...]]


def gather_facts(
    graph: Graph, stages: Sequence[Stage], places: Mapping[str, tuple[str, int]]
) -> CallFacts:
    """Collect what nesting needs to know of the whole graph."""
    names = {name for stage in stages for name in stage.ops if not is_size(graph.op[name])}
    total = Counter(module for name in names for module in graph.op[name].modules)
    parameters: dict[tuple[str, int], dict[str, str]] = {}
    for given in graph.arguments:
        found = parameters.setdefault((given.path, given.call), {})
        for name, value in given.names:
            found.setdefault(value, name)
    results = {(given.path, given.call): given.results for given in graph.arguments}
    return CallFacts(graph, total, places, parameters, results)


@dataclass
class Nesting:
    """The nesting of one stage.

    Attributes:
        results: values that other stages or the caller use.
        banned: paths of modules that must be written out.
        key: gives a body and its module what its uses have in common.
    """

    facts: CallFacts
    stage: Stage
    results: frozenset[str]
    banned: frozenset[str]
    key: Callable[[Body, ModuleCall], Signature]
    ops: list[Op] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.facts.graph
        self.ops = [graph.op[name] for name in self.stage.ops if not is_size(graph.op[name])]
        self.position = {op.name: i for i, op in enumerate(self.ops)}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            for ref in op.refs:
                self.readers[ref].append(i)
        self.pieces = Counter(_starts(self.ops))
        self.held: dict[str, set[str]] = defaultdict(set)
        for name in dict.fromkeys(name for op in self.ops for name in op.params):
            parts = name.split(".")
            for i in range(len(parts)):
                self.held[".".join(parts[:i])].add(name)

    def body(self) -> Body:
        """Return the stage's forward."""
        items = list(self._items(self.ops, 0))
        held = [item for item in items if not isinstance(item, Op | LayerCall)]
        inside, classes = dict(_inside(held)), frozenset(item.module.path for item in held)
        items = [
            part
            for item in items
            for part in (ops_of(item) if _lacks(inside, classes, item) else (item,))
        ]
        takes = (*self.stage.receives, *self.stage.inputs)
        return make_body(self.facts.graph, items, self.results, takes=takes)

    def _items(self, ops: Sequence[Op], depth: int) -> Iterator[Item]:
        for module, group in groupby(ops, key=lambda op: _module_at(op, depth)):
            run = list(group)
            if module is None:
                yield from run
                continue
            inner = list(self._items(run, depth + 1))
            made = self._call(module, run, inner, depth) if self._is_free(module) else None
            yield from inner if made is None else (made,)

    def _is_free(self, module: ModuleCall) -> bool:
        """Whether a call's ops are together on the stage, and it may be a call in the text."""
        return self.pieces[module] == 1 and bool(module.path) and module.path not in self.banned

    def _call(
        self, module: ModuleCall, run: Sequence[Op], inner: Sequence[Item], depth: int
    ) -> Item | None:
        held = frozenset(self.held[module.path])
        facts = self.facts.graph, module, run, held
        layer = layer_call(*facts) or recurrent_call(*facts)
        if layer is not None and self._is_unpacked(layer, run):
            return layer
        if module.type.startswith(CONTAINERS):
            return self._sequential(module, run, inner)
        return self._block(module, run, inner, depth)

    def _is_unpacked(self, layer: LayerCall, run: Sequence[Op]) -> bool:
        """Whether all parts of a layer's tuple are taken inside its call."""
        first, last = self.position[run[0].name], self.position[run[-1].name]
        return not layer.results or all(first <= i <= last for i in self.readers[layer.op.name])

    # ------------------------------------------------------------------ nn.Sequential

    def _sequential(
        self, module: ModuleCall, run: Sequence[Op], inner: Sequence[Item]
    ) -> SequentialCall | None:
        """Return a call of an nn.Sequential, when each child only feeds the next."""
        steps = [item for item in inner if isinstance(item, LayerCall | BlockCall)]
        paths = [f"{module.path}.{i}" for i in range(len(inner))]
        if len(steps) < max(2, len(inner)) or [step.module.path for step in steps] != paths:
            return None
        chained = all(b.takes == a.gives for a, b in pairwise(steps))
        alone = all(len(step.takes) == len(step.gives) == 1 for step in steps)
        if not chained or not alone or self._leaving(run, steps) != steps[-1].gives:
            return None
        if any(isinstance(step, LayerCall) and step.op.random for step in steps):
            return None  # its key is written in the forward that calls it
        if any(isinstance(step, LayerCall) and step.results for step in steps):
            return None  # it returns more than its one value that is read
        if any(isinstance(step, BlockCall) and step.body.outer_params for step in steps):
            return None
        params = {name for step in steps for name in step.params}
        random = any(op.random for op in run)
        if params != self.held[module.path] or (random and module.call):
            return None
        return SequentialCall(module, tuple(steps))

    # ------------------------------------------------------------------ classes

    def _block(
        self, module: ModuleCall, run: Sequence[Op], inner: Sequence[Item], depth: int
    ) -> BlockCall | None:
        if len(run) != self.facts.total[module] or any(leaf_path(op) for op in run):
            return None
        items = [
            part
            for item in inner
            for part in ((item,) if _reaches(module.path, item) else ops_of(item))
        ]
        if sum(map(_weight, items)) < MIN_ITEMS:
            return None
        body = self._ordered(self._body_of(module, run, items, depth))
        params = {name for item in items for name in params_of(item)}
        own = {name for name in params if is_below(name, module.path)}
        if not body.gives or own != self.held[module.path] or not self._draws_agree(body):
            return None
        try:
            with_sizes(self.facts.graph, body)
        except NoSizeError:
            return None
        return BlockCall(module, body, self.key(body, module))

    def _body_of(
        self, module: ModuleCall, run: Sequence[Op], items: Sequence[Item], depth: int
    ) -> Body:
        gives = self._leaving(run, items)
        return make_body(
            self.facts.graph, items, gives, path=module.path, call=module.call, depth=depth
        )

    def _ordered(self, body: Body) -> Body:
        """Put arguments and results in the order of the model's own `forward`."""
        place = body.path, body.call
        takes = _in_order(body.takes, self.facts.parameters.get(place, {}))
        gives = _in_order(body.gives, self.facts.results.get(place, ()))
        return replace(body, takes=takes, gives=gives)

    def _leaving(self, run: Sequence[Op], items: Sequence[Item]) -> tuple[str, ...]:
        """Return the values of items that are read outside a run of ops."""
        first, last = self.position[run[0].name], self.position[run[-1].name]
        return tuple(
            value
            for item in items
            for value in gives_of(item)
            if value in self.results
            or any(not first <= i <= last for i in self.readers.get(value, ()))
        )

    def _draws_agree(self, body: Body) -> bool:
        """Whether the draws of a body can be numbered by its call alone."""
        by_path: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for op in (op for item in body.items if not _is_block(item) for op in ops_of(item)):
            if op.name in self.facts.places:
                path, ordinal = self.facts.places[op.name]
                by_path[path].append((path, ordinal))
        for path, draws in by_path.items():
            if path != body.path and not is_below(path, body.path):
                return False
            first = body.call * len(draws)
            if [ordinal for _, ordinal in draws] != list(range(first, first + len(draws))):
                return False
        calls: dict[str, list[int]] = defaultdict(list)
        for block in blocks_in(body.items):
            if block.body.has_draws:
                calls[block.module.path].append(block.module.call)
        return all(
            found == list(range(body.call * len(found), (body.call + 1) * len(found)))
            for found in calls.values()
        )


def _in_order(values: Sequence[str], order: Iterable[str]) -> tuple[str, ...]:
    """Sort values; those of which no order is known come last, as they are."""
    rank = {value: i for i, value in reversed(list(enumerate(order)))}
    return tuple(sorted(values, key=lambda value: rank.get(value, len(rank))))


def _module_at(op: Op, depth: int) -> ModuleCall | None:
    return op.modules[depth] if len(op.modules) > depth else None


def _starts(ops: Sequence[Op]) -> Iterator[ModuleCall]:
    """Yield each module call once for each time that its ops start anew."""
    before: frozenset[ModuleCall] = frozenset()
    for op in ops:
        now = frozenset(op.modules)
        yield from now - before
        before = now


def _weight(item: Item) -> int:
    """Return how much an item is to write; parts of tuples are written with the tuple."""
    if not isinstance(item, Op):
        return 1
    return len(item.body.ops) if item.body else int(item.target != "operator.getitem")


def _is_block(item: Item) -> bool:
    return isinstance(item, BlockCall | SequentialCall)


def _reaches(path: str, item: Item) -> bool:
    """Whether `self.<child>` reaches an item's module from the module at a path."""
    return isinstance(item, Op) or is_below(item.module.path, path)


def _inside(items: Iterable[Item]) -> Iterator[tuple[str, object]]:
    """Yield every module that is called, inside classes too: its path, and how it is made."""
    for item in items:
        if not isinstance(item, Op):
            yield item.module.path, _made(item)
        if isinstance(item, SequentialCall):
            yield from _inside(item.steps)
        elif isinstance(item, BlockCall):
            yield from _inside(item.body.items)


def _made(item: Item) -> object:
    match item:
        case LayerCall():
            return item.layer
        case BlockCall():
            return item.key
    return None


def _lacks(inside: Mapping[str, object], classes: frozenset[str], item: Item) -> bool:
    """Whether a call is of a module inside one that has a class here, which lacks it."""
    if isinstance(item, Op):
        return False
    path = item.module.path
    parts = path.split(".")
    held = any(".".join(parts[:i]) in classes for i in range(1, len(parts)))
    return held and (path not in inside or inside[path] != _made(item))
