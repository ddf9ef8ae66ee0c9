"""Shards inside an op: what can be cut together, who has which part, and what that sends.

An axis is a set of pieces of dimensions of values and parameters. A dimension is read as
(rest, size, inner), row-major: of a fused qkv's 3 * heads * 32 rows, heads have inner 32. Where
different pieces follow each other, each is read so. Of 24 rows of queries, 8 of keys and 8 of
values, two groups of heads have inner (12, 4, 4). Splitting an axis gives each rank of a tensor
group some of its `size` indices, everywhere.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3, for what is sent; Korthikanti et al.
(2022), "Reducing Activation Recomputation", section 4.2.2, for the sequence between the sums. That
dimensions are followed through the graph instead of named per module is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from bigbrain_fx.core.graph import Graph

ExchangeKind = Literal[
    "copy_to_group", "all_reduce", "all_gather", "split", "reduce_scatter", "gather_to_group"
]
"""Exchange of TP ranks at a place: see `Exchange`."""

SENT_FORWARD = ("all_reduce", "all_gather", "reduce_scatter", "gather_to_group")
SENT_BACKWARD = ("copy_to_group", "split", "reduce_scatter", "gather_to_group")
"""Kinds that send something in the forward pass, and in the backward pass."""

Inner: TypeAlias = int | tuple[int, ...]
"""How many numbers each index of an axis has side by side; several where unlike pieces follow."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an axis in a value or parameter: dimension `dim`, read as (rest, size, inner)."""

    name: str
    dim: int
    inner: Inner = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Message that the ranks of a tensor-parallel group exchange at one place.

    copy_to_group    nothing forward; backward the ranks' gradients are added (Megatron's f)
    all_reduce       forward the ranks' parts are added in rank order; nothing backward (its g)
    all_gather       forward every rank gets the others' parts; backward it keeps its own
    split            forward a rank takes its own part; backward the gradients are gathered
    reduce_scatter   forward each gets its own part of the sum; backward gradients are gathered
    gather_to_group  forward every rank gets the others' parts; backward the ranks' gradients
                     are added, and each gets its own part of the sum

    The last two stand around what is divided along the sequence. One sends forward the first half
    of an all_reduce there, the other its second half.

    Attributes:
        value: what is sent, by its name in the graph that was not split.
        at: the op that needs it, or whose parts are added.
        nbytes: of the whole tensor, for the example batch.
        backward: whether it is sent in the backward pass; what is sent in both is noted twice.
    """

    kind: ExchangeKind
    value: str
    at: str
    nbytes: int
    backward: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """Pieces of dimensions that can only be split together.

    Attributes:
        name: the modules that have it, and its kind.
        kind: heads, hidden, vocabulary, experts, channels, sequence or other.
        size: how many parts it has; a rank gets some of them, whole: key-value groups, say.
        params, values: where it lies.
        along: ops that compute each part from the same part.
        summed: ops whose result is the sum of what the parts give.
        whole: ops that have it and need it whole: norms over it, and ops without a rule.
        gathered: (op along, value) whose weight has it both ways: each part is made of the whole
            value, which is gathered for that op.
        flops: what is divided, forward, for the example batch.
        nbytes: of the parameters that are divided.
        exchanges: what splitting this axis alone would send.
    """

    name: str
    kind: str
    size: int
    params: tuple[Place, ...]
    values: tuple[Place, ...]
    along: tuple[str, ...]
    summed: tuple[str, ...]
    whole: tuple[str, ...]
    flops: int = 0
    nbytes: int = 0
    exchanges: tuple[Exchange, ...] = ()
    gathered: tuple[tuple[str, str], ...] = ()

    def sent_bytes(self, *, backward: bool) -> int:
        """Bytes of the tensors that are exchanged in one direction of a step."""
        return sum(e.nbytes for e in self.exchanges if e.backward == backward)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter that one rank has: indices start..stop of an axis.

    A dimension that is read as (rest, size, inner) is narrowed in its middle, piece by piece.
    """

    param: str
    member: int
    dim: int
    size: int
    inner: Inner
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sharded:
    """A graph for each rank of a tensor group: the same ops, other numbers; and what each has.

    Parameters that no shard names are whole on every rank.
    """

    members: tuple[Graph, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class RuleTrial:
    """One op, whole and in shares: what must give the same numbers before its rule is used.

    Attributes:
        ops: (name of the axis, op): those that it stands for, all identical.
        reduced: the same at smaller sizes, where its own take long; for an op that computes there.
    """

    ops: tuple[tuple[str, str], ...]
    whole: Graph
    sharded: Sharded
    reduced: tuple[Graph, Sharded] | None = None
