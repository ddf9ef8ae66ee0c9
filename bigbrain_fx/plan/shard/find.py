"""Graph -> axes: every dimension followed through every op.

Batch dimensions are no axes: they are replicas' and micro-batches'. An op without a rule, or whose
dimensions do not divide as a rule needs, is whole: what it makes are new dimensions.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from bigbrain_fx.core import Arg, Axis, Dim, Graph, Op, ParamRef, Place, Ref
from bigbrain_fx.plan.shard import layers, picks
from bigbrain_fx.plan.shard.factors import (
    Dims,
    Factor,
    Rule,
    Ruled,
    ShardCall,
    UnlikeError,
    everything,
    flat,
    fresh,
    join_alone,
    size,
    strides,
)
from bigbrain_fx.plan.shard.memory import is_written, works_on_parts

Squares: TypeAlias = Mapping[str, Set[int]]
"""Products with a weight that is one axis both ways, and the dimensions where they make it."""
RULES: Mapping[str, Rule] = {
    **picks.VIEWS,
    **layers.RULES,
    **picks.PICKS,
}

_KINDS = ("experts", "heads", "vocabulary", "channels", "hidden", "sequence")
_ROWS = 1_000_003  # a prime: no view of the model can divide the batch, or take it for a width


def family(target: str) -> str:
    """Return the name under which a target's rule stands: "add" for aten.add_.Tensor.

    A library's own operator, "library.transformers.grouped_mm.default", stands under its name, too.
    """
    space, *rest = target.split(".")
    place = {"aten": 0, "library": 1}.get(space)
    name = rest[place] if place is not None else ""
    return name.rstrip("_") if name.endswith("_") and not name.startswith("__") else name


def followed_axes(graph: Graph) -> list[Axis]:
    """Return what of a graph can be split, by following it from end to end; without names."""
    found = _followed(graph)
    every = [*found.axes()]
    squares = found.squares()
    if squares:
        every += _of_squares(_followed(graph, squares), squares)
        every += (axis for axis in _followed(graph, gathered=squares).axes() if axis.gathered)
    return every


def _followed(
    graph: Graph, apart: Squares | None = None, gathered: Squares | None = None
) -> _Following:
    found = _Following(graph, apart or {}, gathered or {})
    for op in found.graph.ops:
        if op.outputs:
            found.follow(op)
    return found


def _of_squares(found: _Following, squares: Squares) -> Iterator[Axis]:
    """Yield axes of what a square product makes, which is gathered after it."""
    for axis in found.axes():
        made = {p.name for p in axis.values if p.dim in squares.get(p.name, ())}
        if axis.params and not made.isdisjoint(axis.along):
            readers = dict.fromkeys(reader for n in made for reader in found.graph.consumers[n])
            yield replace(axis, whole=(*axis.whole, *readers))


def ruleless(graph: Graph) -> dict[str, int]:
    """Count the ops with tensors that no rule knows, by target."""
    found: dict[str, int] = defaultdict(int)
    for op in graph.ops:
        known = op.target == "operator.getitem" or family(op.target) in RULES
        if op.outputs and op.refs and not known:
            found[op.target] += 1
    return dict(found)


@dataclass
class _Roles:
    """Effects of ops on one factor."""

    params: dict[str, Place] = field(default_factory=dict)
    values: dict[str, Place] = field(default_factory=dict)
    doubled: set[str] = field(default_factory=set)
    along: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)
    touched: dict[str, None] = field(default_factory=dict)


class _Following:
    """Dimensions of every value so far, and what each op said about them.

    Attributes:
        apart: by value the dimensions that whoever reads it does not join with its own.
        gathered: products whose inputs are not joined with what made them: each part of the result
            is made of the whole input.
        known: dimensions as they are made.
        seen: as they are read.
    """

    def __init__(self, graph: Graph, apart: Squares, gathered: Squares) -> None:
        self.example = graph.at(graph.batch)
        self.graph = graph.at(graph.static_batch or _ROWS)
        self.apart, self.gathered = apart, gathered
        self.inputs: dict[str, tuple[Ref, Dims]] = {}  # of those products, as they read them
        self.known: dict[Ref | ParamRef, Dims] = {}
        self.seen: dict[Ref | ParamRef, Dims] = {}
        self.tuples: dict[str, tuple[Dims, ...]] = {}
        self.ruled: dict[str, Ruled] = {}
        self.wholes: set[str] = set()
        self.cuts = dict(end_to_end(self.graph))
        shared: dict[str, Dims] = {}
        for param in self.graph.params:
            dims = shared.setdefault(param.canonical, fresh(map(int, param.spec.shape)))
            self._know(ParamRef(param.name), dims)
        for entry in self.graph.inputs:
            self._know(Ref(entry.name), fresh(map(int, entry.spec.shape)))

    def _know(self, ref: Ref | ParamRef, dims: Dims) -> None:
        self.known[ref] = self.seen[ref] = dims

    @property
    def _is_free(self) -> bool:
        """Whether the batch may have any size; `_ROWS` stands for it."""
        return self.graph.static_batch is None

    def follow(self, op: Op) -> None:
        """Carry the dimensions of what an op reads to what it makes."""
        ruled = self._ruled(op)
        self.ruled[op.name] = ruled
        if op.is_tuple:
            self.tuples[op.name] = ruled.outs
        else:
            self._know(Ref(op.name), ruled.outs[0])
        if op.name in self.apart:
            self.seen[Ref(op.name)] = tuple(
                fresh((size(own),))[0] if dim in self.apart[op.name] else own
                for dim, own in enumerate(ruled.outs[0])
            )

    def squares(self) -> dict[str, Set[int]]:
        """Return the squares.

        `x + linear(x)` joins what a layer reads and what it makes: no part of the weight is made of
        the same part. Its results by themselves can be divided, and gathered; or parts of them are
        made of its input, gathered.
        """
        found: dict[str, Set[int]] = {}
        for name, ruled in self.ruled.items():
            both = {*everything(ruled.along)} & {*everything(ruled.summed)}
            if both and self._reads_square(name, both) and not is_written(self.graph, name):
                dims = enumerate(ruled.outs[0])
                found[name] = {dim for dim, own in dims if both & {*everything(own)}}
        return found

    def _reads_square(self, name: str, both: Set[Factor]) -> bool:
        """Whether an op reads a weight, or what is picked of one, with an axis in two places."""
        op = self.graph.op[name]
        picked = [n for n in op.refs if n in self.graph.op and self.graph.op[n].params]
        weights = (*map(ParamRef, op.params), *map(Ref, picked))
        each = (self.seen[ref] for ref in weights if ref in self.seen)
        return any(sum(bool(both & {*everything(own)}) for own in dims) > 1 for dims in each)

    def _ruled(self, op: Op) -> Ruled:
        if op.target == "operator.getitem":
            return self._item(op)
        whole = Ruled(tuple(fresh(map(int, spec.shape)) for spec in op.outputs))
        rule = RULES.get(family(op.target))
        if rule is None or op.body is not None or self._writes_into_whole(op):
            self.wholes.add(op.name)
            return whole
        if op.name in self.gathered:
            self._part_input(op)
        try:
            return rule(ShardCall(op, self._seen_by(op), self.cuts.get(op.name, ())))
        except (TypeError, IndexError, UnlikeError):
            self.wholes.add(op.name)
            return whole

    def _part_input(self, op: Op) -> None:
        """Note the input of a product with dimensions of its own where the result has them, too.

        That input is the first value that is no weight; the term that an `addmm` adds to its
        product does not count.
        """
        first = 1 if family(op.target) in ("addmm", "baddbmm") else 0
        for ref in op.args[first : first + 2]:
            if isinstance(ref, Ref) and not (ref.value in self.graph.op and self._is_weight(ref)):
                made = self.gathered[op.name]
                dims = self.seen[ref]
                own = (fresh((size(d),))[0] if dim in made else d for dim, d in enumerate(dims))
                self.inputs[op.name] = ref, tuple(own)
                return

    def _is_weight(self, ref: Ref) -> bool:
        return bool(self.graph.op[ref.value].params)

    def _seen_by(self, op: Op) -> Mapping[Ref | ParamRef, Dims]:
        if op.name not in self.inputs:
            return self.seen
        ref, dims = self.inputs[op.name]
        return ChainMap({ref: dims}, self.seen)

    def _writes_into_whole(self, op: Op) -> bool:
        """Return whether it writes into the result of an op without a rule, which stays whole.

        A written value is gathered there, and divided wherever else it is read.
        """
        return any(self._root(name) in self.wholes for name in op.mutates)

    def _root(self, name: str) -> str:
        while (op := self.graph.op.get(name)) is not None and op.view_of:
            name = op.view_of
        return name

    def _item(self, op: Op) -> Ruled:
        source, index = op.args
        assert isinstance(source, Ref)
        assert isinstance(index, int)
        dims = self.tuples[source.value][index]
        return Ruled((dims,), tuple(flat(dims)))

    def axes(self) -> Iterator[Axis]:
        """Yield every axis that divides a parameter or work, without its name."""
        lying = (*self.known.values(), *(self.seen[Ref(name)] for name in self.apart))
        for leaf in dict.fromkeys(f for dims in lying for f in flat(dims)):
            join_alone(leaf, "heads")
        batch = self._batch()
        roles: dict[Factor, _Roles] = defaultdict(_Roles)
        self._note_places(roles)
        for op in self.graph.ops:
            if op.name in self.ruled:
                self._note_ops(op, roles)
        for factor, role in roles.items():
            if factor not in batch and self._is_sound(role):
                axis = self._axis(factor, role)
                if axis.flops or axis.params:
                    yield axis

    def _batch(self) -> set[Factor]:
        rows = [self.known[Ref(e.name)][0] for e in self.graph.inputs if e.batched and e.spec.shape]
        found = set(flat(rows))
        known = (f for dims in self.known.values() for f in _all(dims))
        return found | {f for f in known if self._is_free and f.size % _ROWS == 0}

    def _note_places(self, roles: Mapping[Factor, _Roles]) -> None:
        for ref, dims in self.known.items():
            name = ref.value if isinstance(ref, Ref) else ref.param
            for factor, place in _places(name, dims):
                into = roles[factor].values if isinstance(ref, Ref) else roles[factor].params
                if name in into or (self._is_free and _is_beside_rows(place)):
                    roles[factor].doubled.add(name)
                into[name] = place

    def _note_ops(self, op: Op, roles: Mapping[Factor, _Roles]) -> None:
        ruled = self.ruled[op.name]
        along, summed = set(everything(ruled.along)), set(everything(ruled.summed))
        whole = set(everything(ruled.whole))
        made = [_all(dims) for dims in ruled.outs]
        read = [_all(dims) for dims in ShardCall(op, self._seen_by(op)).tensors()]
        for factor in dict.fromkeys(f for dims in (*made, *read) for f in dims):
            role = roles[factor]
            role.touched[op.name] = None
            names = {op.name, *op.refs, *op.params}
            if names & role.doubled or factor in whole:
                continue
            if factor in along and factor not in summed and all(factor in dims for dims in made):
                role.along.add(op.name)
            elif factor in summed and factor not in along and not any(factor in d for d in made):
                role.summed.add(op.name)

    def _is_sound(self, role: _Roles) -> bool:
        """Whether each op on memory that is written in place works on the ranks' own parts."""
        lies = role.values.keys() | role.params.keys()
        return works_on_parts(self.graph, lies, role.touched, role.along | role.summed)

    def _axis(self, factor: Factor, role: _Roles) -> Axis:
        active = role.along | role.summed
        kind = next((kind for kind in _KINDS if kind in factor.tags), "other")
        return Axis(
            name="",
            kind="sequence" if not role.params and kind in ("hidden", "other") else kind,
            size=factor.size,
            params=tuple(p for n, p in role.params.items() if n not in role.doubled),
            values=tuple(p for n, p in role.values.items() if n not in role.doubled),
            along=tuple(name for name in role.touched if name in role.along),
            summed=tuple(name for name in role.touched if name in role.summed),
            whole=tuple(name for name in role.touched if name not in active),
            flops=sum(int(self.example.op[name].flops) for name in role.touched if name in active),
            nbytes=self._param_bytes(n for n in role.params if n not in role.doubled),
            gathered=tuple(
                (name, ref.value)
                for name, (ref, _) in self.inputs.items()
                if name in role.along and ref.value in role.values and ref.value not in role.doubled
            ),
        )

    def _param_bytes(self, names: Iterable[str]) -> int:
        params = {self.graph.param[name].canonical: self.graph.param[name] for name in names}
        return sum(param.spec.nbytes for param in params.values())


def _places(name: str, dims: Dims) -> Iterator[tuple[Factor, Place]]:
    for dim, own in enumerate(dims):
        for factor, steps in strides(own):
            yield factor, Place(name, dim, steps[0] if len(steps) == 1 else steps)


def _is_beside_rows(place: Place) -> bool:
    steps = (place.inner,) if isinstance(place.inner, int) else place.inner
    return any(step % _ROWS == 0 for step in steps)


def _all(dims: Dims) -> list[Factor]:
    return [factor for own in dims for factor in everything(own)]


def named(found: Iterable[Axis]) -> Iterator[Axis]:
    """Name axes by the modules of their parameters, and their kind."""
    seen: dict[str, int] = defaultdict(int)
    for axis in found:
        paths = [place.name.split(".")[:-1] for place in axis.params]
        values = axis.values[0].name if axis.values else ""
        base = ".".join(paths[0][: common(paths)]) if paths else values
        name = f"{base}:{axis.kind}" if base else axis.kind
        seen[name] += 1
        yield replace(axis, name=name if seen[name] == 1 else f"{name}.{seen[name]}")


def common(paths: Sequence[Sequence[object]]) -> int:
    """Return the length of the common beginning of paths."""
    count = 0
    for items in zip(*paths, strict=False):
        if any(item != items[0] for item in items):
            break
        count += 1
    return count


# --------------------------------------------------------------------- slices that stand end to end


_Span = tuple[int, int]
_CUTS = {
    "aten.slice.Tensor": ("dim", "start", "end", "step"),
    "aten.narrow.default": ("dim", "start", "length"),
}


def end_to_end(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each slice that is one of several end to end, with the sizes of them all.

    Args:
        graph: in numbers.
    """
    found: dict[tuple[Ref | ParamRef, int, int], dict[str, _Span]] = defaultdict(dict)
    for op in graph.ops:
        if op.target in _CUTS and isinstance(op.args[0], Ref | ParamRef):
            size, dim, span = _span(graph, op)
            if span is not None and span != (0, size) and span[0] < span[1]:
                found[op.args[0], dim, size][op.name] = span
    for (_, _, size), spans in found.items():
        sizes = _sizes(sorted(set(spans.values())), size)
        if sizes:
            yield from ((name, sizes) for name in spans)


def _span(graph: Graph, op: Op) -> tuple[int, int, _Span | None]:
    """Return (size, dimension, what is taken) of a slice; None for what is known at run time."""
    source = op.args[0]
    named = dict(zip(_CUTS[op.target], op.args[1:], strict=False)) | dict(op.kwargs)
    dim, start, step = named.get("dim", 0), named.get("start") or 0, named.get("step", 1)
    made = op.outputs[0].shape
    assert isinstance(dim, int)
    dim %= len(made)
    size = int(_shape(graph, source)[dim])
    if not isinstance(start, int) or step != 1:
        return size, dim, None
    start = max(0, start + size if start < 0 else start)
    return size, dim, (start, start + int(made[dim]))


def _shape(graph: Graph, source: Arg) -> tuple[Dim, ...]:
    if isinstance(source, ParamRef):
        return graph.param[source.param].spec.shape
    assert isinstance(source, Ref)
    made = graph.input[source.value].spec if source.value in graph.input else None
    return (made or graph.op[source.value].outputs[0]).shape


def _sizes(spans: list[_Span], size: int) -> tuple[int, ...]:
    """Return the sizes of spans; none unless each begins where the one before ends."""
    ends = [0, *(stop for _, stop in spans)]
    if ends[-1] != size or [start for start, _ in spans] != ends[:-1]:
        return ()
    return tuple(stop - start for start, stop in spans)
