"""Graph, axes, ratios -> one graph for each rank of a tensor group.

Where an op needs a value in another form than it was made in, an exchange is put before it
(`core.Exchange` says which). Ops have the same names on all ranks; only numbers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import TypeAlias, cast

from bigbrain_fx.core import (
    SENT_BACKWARD,
    SENT_FORWARD,
    Arg,
    Axis,
    Crossed,
    Exchange,
    ExchangeKind,
    Graph,
    Input,
    Op,
    Param,
    ParamRef,
    Place,
    Ref,
    Saves,
    Shard,
    Sharded,
    TensorSpec,
    leaves,
)
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.shard.find import family
from bigbrain_fx.plan.shard.local import BIAS, LOCAL, relaid
from bigbrain_fx.plan.shard.local_op import Local, plainly
from bigbrain_fx.plan.shard.memory import owns_all, sees_memory, strides_over
from bigbrain_fx.plan.shard.parted import part_dim, with_parts
from bigbrain_fx.plan.shard.saved import (
    ATTENTION,
    Forms,
    Held,
    SizePart,
    attention_saves,
    beside_layer,
    part_saves,
    with_args,
    with_reads,
)

Shares: TypeAlias = Sequence[float]
_OF_ITS_KIND = ("new_empty", "new_full", "new_ones", "new_zeros")
"""What makes a tensor of another one's type: it reads none of its numbers."""
_POSITIONS = "sequence"
_OFTEN = "_read_often"  # as a cached property is: a graph is frozen


def lengths(size: int, shares: Shares) -> tuple[int, ...]:
    """Divide `size` indices by shares, each rank at least one: 3 by 2:1 is 2, 1.

    One by one to who would be done first with it (D'Hondt).

    Raises:
        InputError: there are more ranks than indices, or a share is not above zero.
    """
    if not all(share > 0 for share in shares):
        raise InputError(
            f"expected shares above 0, found {':'.join(map(str, shares))}",
            code="BX1322",
            at="--tp-ratio",
        )
    if size < len(shares):
        raise InputError(
            f"an axis of {size} cannot be split over {len(shares)} TP ranks",
            code="BX1323",
            at="--tensor-parallel",
            help=f"use at most {size} TP ranks, or leave the axis out",
        )
    return _dealt(size, tuple(shares))


@lru_cache(maxsize=1024)
def _dealt(size: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Deal indices one by one; hundreds of alike axes are asked for, some of 50,000 words."""
    found = [1] * len(shares)
    nexts = [(2 / share, member) for member, share in enumerate(shares)]
    heapify(nexts)
    for _ in range(size - len(shares)):
        _, member = nexts[0]
        found[member] += 1
        heapreplace(nexts, ((found[member] + 1) / shares[member], member))
    return tuple(found)


def sharded(
    graph: Graph,
    axes: Iterable[Axis],
    shares: Shares,
    *,
    scatters: bool = True,
    crossed: Sequence[Crossed] = (),
) -> Sharded:
    """Split a graph along some of its axes.

    Args:
        graph: symbolic or in numbers.
        axes: of this graph; no value and no parameter may have two of them.
        shares: one number a rank; each axis is divided in this proportion.
        scatters: see `core.TensorParallel`.
        crossed: see there, too.

    Raises:
        InputError: two axes meet in one tensor, or an axis is too small.
    """
    divided = [(axis, lengths(axis.size, shares)) for axis in axes]
    if not divided:
        return Sharded((graph,) * len(shares), ())
    _require_apart([axis for axis, _ in divided])
    members = [
        _Rewriting(graph, [SizePart(axis, each, member) for axis, each in divided], scatters)
        for member in range(len(shares))
    ]
    graphs = tuple(_crossing([member.graph() for member in members], crossed, shares))
    return Sharded(graphs, tuple(shard for member in members for shard in member.shards()))


def _crossing(
    members: Sequence[Graph], crossed: Sequence[Crossed], shares: Shares
) -> Iterator[Graph]:
    """Yield ranks' graphs with what crosses between groups in parts."""
    sizes = {}
    for each in crossed:
        spec = members[0].op[each.value].outputs[0]
        dim = part_dim(spec, len(members))
        assert dim is not None
        sizes[each.value] = lengths(cast("int", spec.shape[dim]), shares)
    for member, graph in enumerate(members):
        yield with_parts(graph, crossed, member, sizes) if crossed else graph


def exchanges(graph: Graph, axes: Iterable[Axis]) -> tuple[Exchange, ...]:
    """Return what the ranks of a group would send for an example batch, in graph order."""
    axes = tuple(axes)
    touched = {name for a in axes for name in (*a.along, *a.summed, *a.whole)}
    rewriting = _Rewriting(graph.at(graph.batch), [SizePart(a, (a.size,), 0) for a in axes])
    place = graph.place
    rewriting.visit(rewriting.whole.op[name] for name in sorted(touched, key=place.__getitem__))
    return tuple(found for op in rewriting.forms.ops for found in _sent(op))


def _sent(op: Op) -> Iterator[Exchange]:
    space, _, kind = op.target.partition(".")
    if space != "shard":
        return
    spec, value = op.outputs[0], next(leaves(op.args))
    name = value.value if isinstance(value, Ref) else cast("ParamRef", value).param
    about = cast("ExchangeKind", kind), name, op.name, spec.nbytes
    if kind in SENT_FORWARD:
        yield Exchange(*about, backward=False)
    if kind in SENT_BACKWARD and spec.requires_grad:
        yield Exchange(*about, backward=True)


def _without_bias(op: Op) -> Op:
    place = BIAS.get(family(op.target), len(op.args))
    if place >= len(op.args):
        return op
    return replace(op, args=(*op.args[:place], None, *op.args[place + 1 :]))


def _require_apart(axes: Sequence[Axis]) -> None:
    seen: dict[str, Axis] = {}
    for axis in axes:
        for place in (*axis.params, *axis.values):
            other = seen.setdefault(place.name, axis)
            if other is not axis:
                raise InputError(
                    f"'{place.name}' has two of the axes: {other.name} and {axis.name}",
                    code="BX1324",
                    at="--tp-axes",
                    help=f"leave out {axis.name}",
                )


def _read_often(graph: Graph) -> tuple[tuple[str, bool, tuple[str, ...]], ...]:
    """Return parameters that not just one op reads: whether they are tied, and who does.

    Each axis of a graph is priced, hundreds of them: they are looked for once.
    """
    known = graph.__dict__.get(_OFTEN)
    if known is None:
        names: dict[str, list[str]] = {}
        for param in graph.params:
            names.setdefault(param.canonical, []).append(param.name)
        readers: dict[str, dict[str, None]] = {}
        for op in graph.ops:
            for name in op.params:
                if name in graph.param:
                    readers.setdefault(graph.param[name].canonical, {})[op.name] = None
        known = graph.__dict__[_OFTEN] = tuple(
            (name, len(own) > 1, tuple(readers.get(canonical, ())))
            for canonical, own in names.items()
            for name in own
            if len(own) > 1 or len(readers.get(canonical, ())) != 1
        )
    found: tuple[tuple[str, bool, tuple[str, ...]], ...] = known
    return found


class _Rewriting:
    """One rank: the ops of the graph, each as a part or whole."""

    def __init__(self, graph: Graph, parts: Sequence[SizePart], scatters: bool = True) -> None:
        self.whole, self.parts = graph, parts
        self.forms = Forms(graph, parts, scatters=scatters)
        self.active: dict[str, list[SizePart]] = {}
        for part in parts:
            for name in (*part.axis.along, *part.axis.summed):
                self.active.setdefault(name, []).append(part)
        self.forms.scattered = dict(self._scattered(parts))
        self.forms.mixed = {
            name for name, tied, readers in _read_often(graph) if tied or self._is_mixed(readers)
        }

    def _scattered(self, parts: Iterable[SizePart]) -> Iterator[tuple[str, Held]]:
        """Yield the sums of which each op that reads them reads the rank's own part.

        Of positions: of features a bias, which is added to the sum, would have to be cut as well.
        """
        for part in parts:
            for name in part.axis.summed:
                held = self.forms.place_of.get(name)
                if held is None or held[0] is part or held[0].axis.kind != _POSITIONS:
                    continue
                if self._all_read(name, held[0]):
                    yield name, held

    def _all_read(self, name: str, part: SizePart) -> bool:
        readers = [self.whole.op[reader] for reader in self.whole.consumers[name]]
        tensors = [op.name for op in readers if op.outputs]
        return bool(tensors) and all(self.active.get(reader) == [part] for reader in tensors)

    def _is_mixed(self, readers: Sequence[str]) -> bool:
        """Whether some op reads a parameter otherwise than through a copy that others share."""
        along = [any(r in part.axis.along for part in self.active.get(r, ())) for r in readers]
        return not all(along)

    def graph(self) -> Graph:
        """Return the rank's graph."""
        self.visit(self.whole.ops)
        wanted = dict.fromkeys(
            (*([self.whole.loss] if self.whole.loss else []), *self.whole.outputs)
        )
        made = {name: self._final(name) for name in wanted}
        return replace(
            self.whole,
            params=tuple(map(self._param, self.whole.params)),
            loss=made[self.whole.loss] if self.whole.loss else None,
            outputs=tuple(made[name] for name in self.whole.outputs),
            output_names=tuple((k, made.get(v, v)) for k, v in self.whole.output_names),
            ops=tuple(self.forms.ops),
        )

    def shards(self) -> Iterator[Shard]:
        """Yield what this rank has of parameters that are split."""
        for param in self.whole.params:
            held = self.forms.place_of.get(param.name)
            if held is None:
                continue
            part, place = held
            stop = part.start + part.length
            yield Shard(
                param.name, part.member, place.dim, part.axis.size, place.inner, part.start, stop
            )

    def visit(self, ops: Iterable[Op]) -> None:
        """Write ops, with what must be exchanged before each."""
        for op in ops:
            before = len(self.forms.ops)
            self._visit(op)
            self._note_layouts(self.forms.ops[before:])
            self.forms.forget(op.mutates)

    def _note_layouts(self, made: Iterable[Op]) -> None:
        """Note what may lie in memory otherwise than undivided: what reads such a value."""
        known = self.forms.relaid
        for op in made:
            if not known.isdisjoint(op.refs):
                known.add(op.name)

    def _visit(self, op: Op) -> None:
        active = self.active.get(op.name, ())
        if op.target == "operator.getitem":
            self._item(op)
        elif not (op.outputs or op.mutates or op.checks):
            self.forms.ops.append(op)  # a size; of the batch, which no axis divides
        elif len(active) == 1:
            self._split(op, active[0])
        elif self.parts and sees_memory(op):  # without axes nothing lies otherwise
            self._seeing(op)
        else:
            self.forms.ops.append(self._whole(op, self.forms.whole_form))

    def _seeing(self, op: Op) -> None:
        """Write an op that sees memory: what it reads lies there as it does undivided."""
        local = Local(self.forms, beside_layer(op), op, self.parts[0])

        def laid(ref: Ref | ParamRef) -> Ref | ParamRef:
            now, spec = self.forms.whole_form(ref), self.forms.spec(ref)
            if spec is None or not isinstance(now, Ref):
                return now
            is_other = now.value in self.forms.relaid
            if strides_over(op) and (is_other or now != ref):
                self._require_all(op, ref)
            return relaid(local, now, spec) if is_other else now

        given = self._whole(op, laid)
        self.forms.ops += [*local.made, given]

    def _require_all(self, op: Op, ref: Ref | ParamRef) -> None:
        name = ref.value if isinstance(ref, Ref) else ref.param
        if not owns_all(self.whole, name):
            raise InputError(
                f"'{op.name}' strides over memory of which it is given a part, and a copy of that "
                "part has other neighbours",
                code="BX1325",
                at=op.source or "--tensor-parallel",
                help="call .contiguous() or .clone() before as_strided, or leave "
                "--tensor-parallel out",
            )

    def _whole(self, op: Op, form: Callable[[Ref | ParamRef], Ref | ParamRef]) -> Op:
        """Return an op that reads everything whole; a region is given what its body reads."""
        if family(op.target) in _OF_ITS_KIND:
            return op
        given = with_reads(op, form)
        if op.body is None:
            return given
        refs = {name: form(ParamRef(name)) for name in op.params}
        divided = {
            n: (ref, self.whole.param[n].spec) for n, ref in refs.items() if ref != ParamRef(n)
        }
        return region_given(given, cast("Given", divided))

    def _item(self, op: Op) -> None:
        """Write an item of a tuple: a part where the tuple was made of parts."""
        held = self.forms.place_of.get(op.name)
        if op.refs[0] not in self.forms.own or held is None:
            self.forms.ops.append(op)
            return
        self.forms.own[op.name] = held
        self.forms.ops.append(replace(op, outputs=(self.forms.narrow(op.outputs[0], held),)))

    def _split(self, op: Op, part: SizePart) -> None:
        """Write an op of which each rank computes its part."""

        def changed(ref: Ref | ParamRef) -> Ref | ParamRef:
            held = self.forms.place_of.get(ref.value if isinstance(ref, Ref) else ref.param)
            if held is not None and held[0] is part and not part.gathers(op, ref):
                return self.forms.own_form(ref, held)
            return self.forms.copied_form(ref)

        along = op.name in part.axis.along
        given = with_reads(op if along else _without_bias(op), changed)
        given = part.work(given, self._made(op, part) if along else op.outputs)
        now = {name: changed(Ref(name)) for name in op.refs}
        given = replace(given, saves=self._saves(op, given, part, now) if along else op.saves)
        self.forms.ops += LOCAL.get(family(op.target), plainly)(Local(self.forms, op, given, part))

    def _saves(
        self, op: Op, given: Op, part: SizePart, now: Mapping[str, Ref | ParamRef]
    ) -> Saves | None:
        """Return what the rank's op holds; `now` is what it reads in place of each value."""
        if op.saves is None:
            return None
        place = self.forms.place_of.get(op.name)
        if family(op.target) == ATTENTION and place is not None:
            specs = [self.forms.spec(ref) for ref in op.args[:3] if isinstance(ref, Ref)]
            if place[1].dim == len(op.outputs[0].shape) - 1 and all(specs):
                return attention_saves([spec for spec in specs if spec], op.outputs[0])
        at = {
            name: given.refs.index(ref.value) for name, ref in now.items() if isinstance(ref, Ref)
        }
        wants = (
            self.forms.spec(Ref(name))
            for name in op.refs
            if name not in self.forms.place_of or part.gathers(op, Ref(name))
        )
        shared = any(spec is not None and spec.requires_grad for spec in wants)
        moved = [at[op.refs[i]] if i >= 0 else i for i in op.saves.values]
        passed = [at[op.refs[i]] for i in op.saves.passed if i < len(op.refs)]
        saves = replace(op.saves, values=tuple(moved), passed=tuple(passed))
        return part_saves(saves, part, shared=shared)

    def _made(self, op: Op, part: SizePart) -> tuple[TensorSpec, ...]:
        """Note that an op makes parts; return how they are."""
        if not op.is_tuple:
            held = self.forms.own[op.name] = self.forms.place_of[op.name]
            return (self.forms.narrow(op.outputs[0], held),)
        self.forms.own[op.name] = part, Place(op.name, 0)
        specs = list(op.outputs)
        for name in self.whole.consumers.get(op.name, ()):
            index = self.whole.op[name].args[1]
            if name in self.forms.place_of and isinstance(index, int):
                specs[index] = self.forms.narrow(specs[index], self.forms.place_of[name])
        return tuple(specs)

    def _final(self, name: str) -> str:
        made = self.forms.whole_form(Ref(name))
        return cast("Ref", made).value

    def _param(self, param: Param) -> Param:
        held = self.forms.place_of.get(param.name)
        return param if held is None else replace(param, spec=self.forms.narrow(param.spec, held))


# --------------------------------------------------------------------------- regions


Given = Mapping[str, tuple[Ref, TensorSpec]]


def region_given(op: Op, values: Given) -> Op:
    """Return a region, and those in it, that reads values where it read these parameters.

    Args:
        op: a region, as `core.Op` describes it; any other op comes back as it is.
        values: by parameter, what is read in its place, and how that is.
    """
    read = {name: values[name] for name in op.params if name in values}
    if op.body is None or not read:
        return op

    def changed(arg: Arg) -> Arg:
        return read[arg.param][0] if isinstance(arg, ParamRef) and arg.param in read else arg

    def inside(each: Op) -> Op:
        return region_given(with_args(each, changed), read)

    entries = (Input(ref.value, (), spec, batched=False) for ref, spec in read.values())
    body = replace(op.body, ops=tuple(map(inside, op.body.ops)), inputs=(*op.body.inputs, *entries))
    return replace(op, args=(*op.args, *(ref for ref, _ in read.values())), body=body)
