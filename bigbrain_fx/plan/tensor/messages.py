"""Plan -> what the members of each group send each other in a step: a channel for each size.

Messages of one size and type between two devices share a channel, in the order of the program: so
there are few of them, however deep the model is. This file knows exchanges; it knows no bytes on a
wire.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import cast

from bigbrain_fx.core import DTYPE_BYTES, Graph, Op, Stage
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.tensor.costs import BACKWARD, SPACE, pieces


@dataclass(frozen=True)
class PartChannel:
    """Messages of one size from one member of a group to another.

    Attributes:
        source, target: the first stage of each of the two devices.
        per_step: how many a step has.
    """

    source: int
    target: int
    sender: str
    receiver: str
    numel: int
    dtype: str
    per_step: int

    @property
    def nbytes(self) -> int:
        """Bytes that travel in a step."""
        return self.numel * DTYPE_BYTES[self.dtype] * self.per_step


def part_channels(plan: Plan) -> tuple[PartChannel, ...]:
    """Return the channels between members of a plan's groups; none without groups."""
    tensor = plan.placement.tensor
    if tensor is None:
        return ()
    used = set(plan.stages.devices)
    groups = [group for group in tensor.groups if used & set(group)]
    return tuple(
        PartChannel(
            plan.stages.of(a)[0].index,
            plan.stages.of(b)[0].index,
            a,
            b,
            numel,
            dtype,
            count * len(plan.stages.micros_of(plan.stages.of(a)[0].index, plan.micro_batches)),
        )
        for group in groups
        for member, a in enumerate(group)
        for to, b in enumerate(group)
        if a != b
        for (numel, dtype), count in sorted(_sent(plan, a, member, to).items())
    )


def _sent(plan: Plan, device: str, member: int, to: int) -> Counter[tuple[int, str]]:
    """Count what a member sends another member for a micro-batch, by size and type."""
    graph, members = plan.sharded.members[member].at(plan.rows), plan.stages.members
    return Counter(
        (numel, op.outputs[0].dtype)
        for stage in plan.stages.of(device)
        for op in (graph.op[name] for name in stage.ops)
        if op.target.startswith(SPACE) and is_sent(graph, op)
        for _ in range(times(op, stage))
        for numel in _numels(op, member, to, members)
    )


def times(op: Op, stage: Stage) -> int:
    """Return how often an exchange is made for a micro-batch: again where a forward runs again."""
    return 2 if stage.runs_again and op.target not in BACKWARD else 1


def is_sent(graph: Graph, op: Op) -> bool:
    """Whether an exchange sends anything: those of the backward pass where a gradient comes."""
    return op.target not in BACKWARD or (op.requires_grad and op.name in graph.graded)


def _numels(op: Op, member: int, to: int, members: int) -> tuple[int, ...]:
    """Return the numbers in a member's messages to another: a whole tensor, its part, pieces."""
    numel = op.outputs[0].numel
    if op.target == "shard.split":
        return (numel,)  # the part that it keeps
    if op.target == "shard.all_gather":
        lengths = cast("tuple[int, ...]", op.args[3])
        return (numel // sum(lengths) * lengths[member],)
    lengths = pieces(numel, members)
    return (lengths[to], lengths[member]) if len(lengths) > 1 else lengths
