"""What a member's ops hold: its part of what capture measured; the rest, written here, by rule.

Exchanges are `runtime.group`, whose tensors are counted here; ops that stand in an op's place are
torch's own, of which derivatives.yaml says what autograd keeps. This file knows sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import (
    Axis,
    Dim,
    Op,
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

# ------------------------------------------------------------------------------------------------
# Sizes of parts: what becomes of shapes, strides and counts when an axis is divided.


@dataclass(frozen=True, slots=True)
class SizePart:
    """What one member has of an axis."""

    axis: Axis
    lengths: tuple[int, ...]
    member: int

    @property
    def start(self) -> int:
        """First index of the axis that the member has."""
        return sum(self.lengths[: self.member])

    @property
    def length(self) -> int:
        """How many of them it has."""
        return self.lengths[self.member]

    def gathers(self, op: Op, arg: object) -> bool:
        """Whether an op makes its part of the whole of a value that has the axis, too."""
        return isinstance(arg, Ref) and (op.name, arg.value) in self.axis.gathered

    def of(self, count: Dim) -> Dim:
        """Return the member's part of a count."""
        if isinstance(count, int):
            return count * self.length // self.axis.size
        return f"({count})*{self.length}//{self.axis.size}"

    def narrow(self, spec: TensorSpec, place: Place, batch: int) -> TensorSpec:
        """Return how the member's part of a tensor is."""
        there = spec.strides[place.dim] if spec.strides else 0
        shape = tuple(self.of(n) if i == place.dim else n for i, n in enumerate(spec.shape))
        strides = tuple(
            self.of(stride) if size_of(stride, batch) > size_of(there, batch) else stride
            for stride in spec.strides
        )
        return replace(spec, shape=shape, strides=strides)

    def work(self, op: Op, outputs: tuple[TensorSpec, ...]) -> Op:
        """Return an op with the member's part of its work, but for what it saves."""
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
# What a member's ops hold: its part of what capture measured; the rest, written here, by rule.


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
    """Return what a member's part of an op holds, of what the whole op does.

    Args:
        saves: measured, for the whole.
        part: what the member has.
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
        whole: the tensor of which members have parts, or of which all have one.
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
