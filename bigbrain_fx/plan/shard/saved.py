"""Memory of a rank's ops: its part of the measured bytes; written ops by rule.

Exchanges are `runtime.group`, whose tensors are counted here; ops that stand in an op's place are
torch's own, of which derivatives.yaml says what autograd keeps. Then come the forms of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import (
    Arg,
    Axis,
    Dim,
    Graph,
    Op,
    ParamRef,
    Place,
    Ref,
    Saves,
    TensorSpec,
    dense_strides,
    memory_order,
    nbytes,
    plus,
    size_of,
    times,
)
from bigbrain_fx.plan.shard.find import common

# ------------------------------------------------------------------------------------------------
# Sizes of parts: what becomes of shapes, strides and counts when an axis is divided.


@dataclass(frozen=True, slots=True)
class SizePart:
    """Part of an axis that one rank has."""

    axis: Axis
    lengths: tuple[int, ...]
    member: int

    @property
    def start(self) -> int:
        """First index of the axis that the rank has."""
        return sum(self.lengths[: self.member])

    @property
    def length(self) -> int:
        """How many of them it has."""
        return self.lengths[self.member]

    def gathers(self, op: Op, arg: object) -> bool:
        """Whether an op makes its part of the whole of a value that has the axis, too."""
        return isinstance(arg, Ref) and (op.name, arg.value) in self.axis.gathered

    def of(self, count: Dim) -> Dim:
        """Return the rank's part of a count."""
        if isinstance(count, int):
            return count * self.length // self.axis.size
        return f"({count})*{self.length}//{self.axis.size}"

    def narrow(self, spec: TensorSpec, place: Place, batch: int) -> TensorSpec:
        """Return how the rank's part of a tensor is."""
        there = spec.strides[place.dim] if spec.strides else 0
        shape = tuple(self.of(n) if i == place.dim else n for i, n in enumerate(spec.shape))
        strides = tuple(
            self.of(stride) if size_of(stride, batch) > size_of(there, batch) else stride
            for stride in spec.strides
        )
        return replace(spec, shape=shape, strides=strides)

    def work(self, op: Op, outputs: tuple[TensorSpec, ...]) -> Op:
        """Return an op with the rank's part of its work, but for what it saves."""
        return replace(
            op,
            outputs=outputs,
            flops=self.of(op.flops),
            reads_bytes=self.of(op.reads_bytes),
            writes_bytes=self.of(op.writes_bytes),
            saves=None,
        )


def dense(shape: Sequence[Dim], dtype: str, *, grad: bool) -> TensorSpec:
    """Return a dense tensor's spec."""
    return TensorSpec(tuple(shape), dtype, dense_strides(shape), grad)


def lies(spec: TensorSpec, batch: int) -> tuple[int, ...]:
    """Return a tensor's dimensions as they lie in memory, the slowest first."""
    exact = spec.at(batch)
    strides = exact.strides or dense_strides(exact.shape)
    return memory_order([int(n) for n in exact.shape], [int(n) for n in strides])


def is_row_by_row(spec: TensorSpec, batch: int) -> bool:
    """Whether a tensor's last dimension is the fastest in memory, and so on."""
    return lies(spec, batch) == tuple(range(len(spec.shape)))


# ------------------------------------------------------------------------------------------------
# What a rank's ops hold: its part of what capture measured; the rest, written here, by rule.


ATTENTION = "scaled_dot_product_attention"
OWN = -1  # the place of an op's own result
_LARGE = 1 << 14  # numbers: `runtime.group` adds pieces of what is larger
_NOTHING = "add sub neg sum amax lt ge eq logical_or logical_and logical_not ones triu arange"
_RESULT = "exp softmax"
_INPUTS = "mul div matmul mm bmm linear log"
_VIEWS = "transpose reshape unsqueeze squeeze flatten alias narrow detach"

RULES: Mapping[str, str] = {
    **dict.fromkeys(_NOTHING.split(), "nothing"),
    **dict.fromkeys(_RESULT.split(), "result"),
    **dict.fromkeys(_INPUTS.split(), "inputs"),
    **dict.fromkeys(_VIEWS.split(), "view"),
    "masked_fill": "second",
    "gather": "last",
    "embedding": "last",
    "to": "nothing",
}
"""Which of the values that it reads an op keeps, for those that stand in another's place."""


def attention_saves(read: Sequence[TensorSpec], made: TensorSpec) -> Saves:
    """Return what attention holds whose values are narrower than its queries and keys.

    No fused kernel takes them: torch computes in single steps, and keeps scaled queries and keys
    and the probabilities.

    Args:
        read: queries, keys and values, whole.
        made: what comes out, whole.
    """
    query, key = read[:2]
    square = replace(query, shape=(*query.shape[:-1], key.shape[-2]))
    kept = plus(nbytes(query), nbytes(key), nbytes(square))
    most = plus(kept, nbytes(square), nbytes(made))
    return Saves((2,) if len(read) > 2 else (), kept, most, most)


def part_saves(saves: Saves, part: SizePart, *, shared: bool) -> Saves:
    """Return what a rank's part of an op holds, of what the whole op does.

    Args:
        saves: measured, for the whole.
        part: what the rank has.
        shared: whether the op gives a whole value a gradient: that is not divided.
    """
    cuda = saves.cuda_own_bytes
    return replace(
        saves,
        own_bytes=part.of(saves.own_bytes),
        forward_bytes=part.of(saves.forward_bytes),
        backward_bytes=saves.backward_bytes if shared else part.of(saves.backward_bytes),
        cuda_own_bytes=None if cuda is None else part.of(cuda),
    )


def rule_saves(op: Op, family: str) -> Saves | None:
    """Return what an op holds that stands in another's place; None where no rule knows."""
    made = nbytes(op.outputs[0]) if op.outputs else 0
    kind, count = RULES.get(family), len(op.refs)
    if kind is None:
        return None
    if kind == "view":
        return Saves(passed=(0,))
    kept = {
        "nothing": (),
        "result": (OWN,),
        "inputs": tuple(range(count)),
        "second": (1,) if count > 1 else (),
        "last": (count - 1,) if count else (),
    }[kind]
    return Saves(kept, 0, made, times(made, count), (0,) if family == "add" else ())


def exchange_saves(kind: str, whole: TensorSpec, members: int) -> Saves:
    """Return what an exchange holds: what it has received, and what it makes of that.

    Args:
        kind: of exchange.
        whole: the tensor of which ranks have parts, or of which all have one.
        members: of the group.
    """
    size = nbytes(whole)
    is_cut = members > 2 and not (isinstance(size, int) and size < _LARGE)
    added = times(size, 2 if members == 2 else 3 if is_cut else members + 1)
    joined = times(size, 2)
    forward, backward = {
        "all_reduce": (added, 0),
        "copy_to_group": (0, added),
        "all_gather": (joined, size),
        "split": (size, joined),
        "reduce_scatter": (times(size, 3), joined),
        "gather_to_group": (joined, times(size, 3)),
    }[kind]
    return Saves((), 0, forward, backward, (0,) if kind == "all_reduce" else ())


# ------------------------------------------------------------------------------------------------
# The forms of values on one rank: whole, the own part, whole with gradients summed.
#
# A value that stands whole is the same on all ranks, and so is its gradient; of a part, each
# rank has its own gradient. Asked for another form, an exchange is put into the graph, once.


def with_args(op: Op, change: Callable[[Arg], Arg]) -> Op:
    """Return an op with each argument changed, those in tuples one by one."""

    def changed(arg: Arg) -> Arg:
        return tuple(map(changed, arg)) if isinstance(arg, tuple) else change(arg)

    kwargs = tuple((key, changed(value)) for key, value in op.kwargs)
    return replace(op, args=tuple(map(changed, op.args)), kwargs=kwargs)


def with_reads(op: Op, change: Callable[[Ref | ParamRef], Arg]) -> Op:
    """Return an op that reads other values."""
    return with_args(op, lambda arg: change(arg) if isinstance(arg, Ref | ParamRef) else arg)


Held = tuple[SizePart, Place]
AT_ONCE = "at once"  # what a copy of such a parameter is given; others wait for the backward's end
_SUFFIXES = {
    "all_gather": "whole",
    "gather_to_group": "gathered",
    "split": "own",
    "copy_to_group": "copy",
}


class Forms:
    """One rank's graph as it grows: its ops, and how each value stands."""

    def __init__(self, graph: Graph, parts: Iterable[SizePart], *, scatters: bool) -> None:
        self.whole, self.scatters = graph, scatters
        self.ops: list[Op] = []
        self.own: dict[str, Held] = {}  # values that were made as parts
        self.place_of: dict[str, Held] = {}  # where the axes lie, whether or not it was made so
        self.scattered: dict[str, Held] = {}  # sums of which each rank reads its own part only
        parts = [*parts]
        for part in parts:
            for place in (*part.axis.values, *part.axis.params):
                self.place_of[place.name] = part, place
        self.relaid: set[str] = set()  # values that may lie in memory otherwise than undivided
        self.mixed: set[str] = set()  # parameters of which not all gradients are parts of a sum
        self.members = max((len(part.lengths) for part in parts), default=1)
        self._names: set[str] = set()  # of values that are in no graph yet
        self._made: dict[tuple[str, str], str] = {}

    def whole_form(self, ref: Ref | ParamRef) -> Ref | ParamRef:
        """Return a value whole, as every rank has it."""
        held = self._held(ref)
        if held is None:
            return ref
        return self._exchanged("all_gather", ref, self.spec(ref), ref, held)

    def copied_form(self, ref: Ref | ParamRef) -> Ref | ParamRef:
        """Return a value whole, for an op that gives it a part of its gradient."""
        spec, held = self.spec(ref), self._held(ref)
        if spec is None or not (spec.requires_grad and self.whole.training):
            return self.whole_form(ref)
        is_gathered = isinstance(ref, Ref) and ("all_gather", ref.value) in self._made
        if self.scatters and held is not None and isinstance(ref, Ref) and not is_gathered:
            return self._exchanged("gather_to_group", ref, spec, ref, held)
        return self._exchanged("copy_to_group", ref, spec, self.whole_form(ref), None)

    def own_form(self, ref: Ref | ParamRef, held: Held) -> Ref | ParamRef:
        """Return the rank's own part of a value."""
        if self._held(ref) is not None:
            return ref
        spec = self.spec(ref)
        assert spec is not None
        return self._exchanged("split", ref, self.narrow(spec, held), ref, held)

    def narrow(self, spec: TensorSpec, held: Held) -> TensorSpec:
        """Return how the rank's part of a tensor is."""
        return held[0].narrow(spec, held[1], self.whole.batch)

    def exchange(
        self,
        kind: str,
        name: str,
        value: Arg,
        spec: TensorSpec,
        like: Op,
        *args: Arg,
        whole: TensorSpec | None = None,
    ) -> Op:
        """Return an op that exchanges something with the other ranks.

        Args:
            kind: of exchange.
            name: of the op.
            value: what is exchanged.
            spec: of what comes out.
            like: the op beside which it stands.
            args: besides the value.
            whole: where a part comes out, what it is of.
        """
        like, undivided = beside_layer(like), whole or spec
        if not is_row_by_row(undivided, self.whole.batch):
            self.relaid.add(name)
        return Op(
            name=name,
            target=f"shard.{kind}",
            args=(value, *args),
            outputs=(spec,),
            modules=like.modules,
            source=like.source,
            code=like.code,
            lines=like.lines,
            saves=exchange_saves(kind, undivided, self.members),
        )

    def forget(self, names: Iterable[str]) -> None:
        """Forget what was made of values before they were written into."""
        old = set(names)
        if not old:
            return
        self._made = {key: made for key, made in self._made.items() if key[1] not in old}

    def name(self, wish: str) -> str:
        """Return a name that no value has; the same on every member."""
        found, count = wish, 1
        while self._is_taken(found):
            count += 1
            found = f"{wish}_{count}"
        self._names.add(found)
        return found

    def _is_taken(self, name: str) -> bool:
        return name in self._names or name in self.whole.op or name in self.whole.input

    def _exchanged(
        self,
        kind: str,
        ref: Ref | ParamRef,
        spec: TensorSpec | None,
        value: Ref | ParamRef,
        held: Held | None,
    ) -> Ref:
        name = ref.value if isinstance(ref, Ref) else ref.param
        if (kind, name) not in self._made:
            assert spec is not None
            made = self.name(f"{name.replace('.', '_')}_{_SUFFIXES[kind]}")
            args: tuple[Arg, ...] = layout(*held) if held else ()
            if kind == "copy_to_group" and name in self.mixed:
                args = (AT_ONCE,)
            around, whole = self._around(name), self.spec(ref)
            self.ops.append(self.exchange(kind, made, value, spec, around, *args, whole=whole))
            self._made[kind, name] = made
        return Ref(self._made[kind, name])

    def _around(self, name: str) -> Op:
        """Return an op inside the innermost module call that all readers of a value share."""
        readers = self._readers(name)
        first = readers[0] if readers else self.whole.ops[-1]
        count = common([op.modules for op in readers])
        return replace(first, modules=first.modules[:count], lines=first.lines[: count + 1])

    def _readers(self, name: str) -> list[Op]:
        of = self.whole.param_readers if name in self.whole.param else self.whole.consumers
        return [self.whole.op[reader] for reader in of[name]]

    def _held(self, ref: Ref | ParamRef) -> Held | None:
        if isinstance(ref, ParamRef):
            return self.place_of.get(ref.param)
        return self.own.get(ref.value)

    def spec(self, ref: Ref | ParamRef) -> TensorSpec | None:
        """Return how a value is in the graph that is split; None for what is no tensor."""
        if isinstance(ref, ParamRef):
            return self.whole.param[ref.param].spec
        if ref.value in self.whole.input:
            return self.whole.input[ref.value].spec
        op = self.whole.op[ref.value]
        return op.outputs[0] if op.outputs and not op.is_tuple else None


def beside_layer(op: Op) -> Op:
    """Return an op as if it were written beside the call of torch's layer that it belongs to.

    So what is left in the layer is the layer's own call, only narrower.
    """
    if not op.modules or not op.modules[-1].type.startswith("torch.nn.modules."):
        return op
    count = len(op.modules)
    return replace(op, modules=op.modules[:-1], lines=op.lines[:count])


def layout(part: SizePart, place: Place) -> tuple[Dim | tuple[int, ...], ...]:
    """Return (dimension, inner, what each rank has): how parts lie in a whole."""
    return place.dim, place.inner, part.lengths
