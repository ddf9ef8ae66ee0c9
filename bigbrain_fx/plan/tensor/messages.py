"""Plan -> what the ranks of each group send each other in a step: a channel for each size.

Messages of one size and type between two devices share a channel, in the order of the program.
There are few channels, however deep the model is. This file knows exchanges; it knows no bytes on a
wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from bigbrain_fx.core import (
    DTYPE_BYTES,
    SENT_BACKWARD,
    SENT_FORWARD,
    Cluster,
    Dim,
    Graph,
    Op,
    ParamRef,
    Stage,
    TensorSpec,
)
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.planning import AHEAD, live_ops

# ------------------------------------------------------------------------------------------------
# One exchange of a tensor group: what it sends, and when each rank goes on from it.
#
#   rank 0  ██████ sends ────▶            █████    the faster one waits for what is sent to it
#   rank 1  ██████████████████ sends ────▶█████    the slower one finds it there, and waits not


SPACE = "shard."
LARGE = 1 << 14  # numbers; `runtime.group` has it, too
_ADDS, _COPIES = 3, 2  # how often the bytes of a tensor move that is added to another, or copied


def pieces(numel: int, members: int) -> tuple[int, ...]:
    """Return how many numbers of a sum each rank adds; one entry where each adds all of it."""
    if members == 2 or numel < LARGE:
        return (numel,)
    return tuple(numel // members + (member < numel % members) for member in range(members))


def sent_share(kind: str, numel: int, members: int) -> float:
    """Return the share of a whole tensor that a rank sends each other one in an exchange."""
    if kind not in ("all_reduce", "copy_to_group"):
        return 1 / members
    return 2 / members if len(pieces(numel, members)) > 1 else 1.0


def sends_forward(op: Op) -> bool:
    """Whether an exchange sends in the forward pass."""
    return op.target.removeprefix(SPACE) in SENT_FORWARD


def sends_backward(op: Op) -> bool:
    """Whether an exchange sends in the backward pass, where a gradient comes to it."""
    return op.target.removeprefix(SPACE) in SENT_BACKWARD and op.requires_grad


def exchange_s(op: Op, cluster: Cluster, group: Sequence[str], *, backward: bool) -> float:
    """Return the seconds of an exchange to which all ranks come at once, in one pass."""
    return max(exchanged_s(op, cluster, group, [0.0] * len(group), backward=backward))


def exchanged_s(
    op: Op, cluster: Cluster, group: Sequence[str], ready_s: Sequence[float], *, backward: bool
) -> list[float]:
    """Return when each rank goes on: every one sends to every other.

    Args:
        op: concrete.
        cluster: with the links.
        group: the ranks' devices.
        ready_s: when each of them comes to it.
        backward: in which pass.
    """
    clocks_s = list(ready_s)
    for nbytes, touched_bytes in _rounds(op, len(group), backward=backward):
        clocks_s = _round(cluster, group, nbytes, clocks_s, touched_bytes)
    return clocks_s


def sum_s(nbytes: int, cluster: Cluster, group: Sequence[str]) -> float:
    """Return the seconds of a sum of which each rank sends all to every other."""
    others = len(group) - 1
    return max(_round(cluster, group, nbytes, [0.0] * len(group), others * _ADDS * nbytes))


def _rounds(op: Op, members: int, *, backward: bool) -> Iterator[tuple[int, int]]:
    """Yield the bytes that each rank sends each other one, and those that it touches itself."""
    spec, kind, others = op.outputs[0], op.target.removeprefix(SPACE), members - 1
    if kind in ("all_reduce", "copy_to_group"):
        if len(pieces(spec.numel, members)) == 1:
            yield spec.nbytes, others * _ADDS * spec.nbytes
            return
        piece = -(-spec.nbytes // members)
        yield from ((piece, others * _ADDS * piece), (piece, 0))
        return
    is_part = kind in ("split", "reduce_scatter")
    part = spec.nbytes if is_part else spec.nbytes // members
    moved = _COPIES * part * members  # parts are put together, or taken out of the whole
    is_sum = kind == ("gather_to_group" if backward else "reduce_scatter")
    yield part, moved + (others * _ADDS * part if is_sum else 0)


def _round(
    cluster: Cluster,
    group: Sequence[str],
    nbytes: int,
    ready_s: Sequence[float],
    touched_bytes: int,
) -> list[float]:
    others = len(group) - 1
    devices = [cluster.device[name] for name in group]
    each_s = [others * device.overheads.handling_s(nbytes) for device in devices]
    sent_s = [ready + own for ready, own in zip(ready_s, each_s, strict=True)]
    return [
        max(sent_s[i], _arrived_s(cluster, group, nbytes, sent_s, i))
        + each_s[i]
        + touched_bytes / device.memory_bytes_per_s
        for i, device in enumerate(devices)
    ]


def _arrived_s(
    cluster: Cluster, group: Sequence[str], nbytes: int, sent_s: Sequence[float], member: int
) -> float:
    """Return when the last message of the others is there; messages are sent one after another.

    A message that leaves or enters a host goes through its NIC beside all else of this exchange.
    """
    arrived_s, through_s, own = 0.0, 0.0, group[member]
    crowded = _crowded_s(cluster, group, nbytes, own) if cluster.has_shared_nics else {}
    for begun_s, other in sorted(zip(sent_s, group, strict=True)):
        if other != own:
            link = cluster.link(other, own)
            arrived_s = max(arrived_s, begun_s + link.latency_s) + link.wire_s(nbytes)
            through_s = max(through_s, begun_s + link.latency_s + crowded.get(other, 0.0))
    return max(arrived_s, through_s)


def _crowded_s(
    cluster: Cluster, group: Sequence[str], nbytes: int, own: str
) -> Mapping[str, float]:
    """Return, by who sends to a rank, what the fullest NIC on the way takes for all messages."""
    used = Counter(nic for a in group for b in group if a != b for nic in cluster.nics(a, b))
    return {
        other: max(
            (count * nbytes / rate for (_, rate), count in _on_way(cluster, used, other, own)),
            default=0.0,
        )
        for other in group
        if other != own
    }


def _on_way(
    cluster: Cluster, used: Counter[tuple[str, float]], a: str, b: str
) -> Iterator[tuple[tuple[str, float], int]]:
    return ((nic, used[nic]) for nic in cluster.nics(a, b))


# ------------------------------------------------------------------------------------------------
# Plan -> what the ranks of each group send each other in a step: a channel for each size.


@dataclass(frozen=True)
class PartChannel:
    """Messages of one size from one rank of a group to another.

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
    """Return the channels between ranks of a plan's groups; none without groups."""
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


def posted_bytes(plan: Plan) -> Counter[str]:
    """Return what each device has ready for the next messages of its group, all the time."""
    found: Counter[str] = Counter()
    if not all(plan.cluster.device[name].kind == "cuda" for name in plan.stages.devices):
        for channel in part_channels(plan):
            one = channel.numel * DTYPE_BYTES[channel.dtype]
            found[channel.receiver] += one * min(AHEAD, channel.per_step)
    return found


def _sent(plan: Plan, device: str, member: int, to: int) -> Counter[tuple[int, str]]:
    """Count what a rank sends another rank for a micro-batch, by size and type."""
    graph, members = plan.sharded.members[member].at(plan.rows), plan.stages.members
    found = Counter(
        (numel, op.outputs[0].dtype)
        for stage in plan.stages.of(device)
        for op in exchanges_of(graph, stage)
        for backward, count in passes(graph, op, again=stage.runs_again)
        for _ in range(count)
        for numel in _numels(op, member, to, members, backward=backward)
    )
    for stage in plan.stages.of(device):
        found.update((spec.numel, spec.dtype) for spec in waiting_sums(graph, stage))
    return found


def exchanges_of(graph: Graph, stage: Stage) -> Iterator[Op]:
    """Yield the exchanges of a stage that send messages of their own."""
    for name in stage.ops:
        op = graph.op[name]
        if op.target.startswith(SPACE) and not waits(graph, op):
            yield op


def waiting_sums(graph: Graph, stage: Stage) -> Iterator[TensorSpec]:
    """Yield what is sent for gradients that wait for the end of a stage's backward: one a type."""
    numels = Counter[str]()
    for op in (graph.op[name] for name in stage.ops):
        if waits(graph, op) and any(passes(graph, op, again=False)):
            numels[op.outputs[0].dtype] += op.outputs[0].numel
    for dtype, numel in numels.items():
        yield TensorSpec((numel,), dtype, (1,), True)


def waits(graph: Graph, op: Op) -> bool:
    """Whether the gradients of an exchange are added with others': see `copy_to_group`."""
    return op.target == f"{SPACE}copy_to_group" and len(op.args) == 1 and _is_weight(graph, op)


def sent_bytes(members: Sequence[Graph], runs: Iterable[tuple[int, Collection[str]]]) -> int:
    """Return the most bytes of a step that a rank sends the next one, over all groups.

    Args:
        members: their graphs at the rows of a micro-batch.
        runs: of each replica, how many micro-batches it has, and the ops that it runs twice.
    """
    count, runs = len(members), [*runs]
    return max(
        sum(micros * _once(graph, m, (m + 1) % count, count, again) for micros, again in runs)
        for m, graph in enumerate(members)
    )


def _once(graph: Graph, member: int, to: int, members: int, again: Collection[str]) -> int:
    live = live_ops(graph)  # outputs beside a loss are joined for nobody
    return sum(
        count * numel * DTYPE_BYTES[op.outputs[0].dtype]
        for op in graph.ops
        if op.target.startswith(SPACE) and op.name in live
        for backward, count in passes(graph, op, again=op.name in again)
        for numel in (
            (op.outputs[0].numel,)
            if waits(graph, op)
            else _numels(op, member, to, members, backward=backward)
        )
    )


def passes(graph: Graph, op: Op, *, again: bool) -> Iterator[tuple[bool, int]]:
    """Yield the passes of a micro-batch in which an exchange sends: (is it backward, how often).

    Args:
        graph: that it is of.
        op: the exchange.
        again: whether its forward runs again before the backward.
    """
    if sends_forward(op):
        yield False, 2 if again else 1
    if sends_backward(op) and op.name in graph.graded:
        yield True, 1


def require_growing(graph: Graph) -> None:
    """Refuse, for micro-batches of unequal rows, exchanges whose channel has no known size.

    A message of few rows goes where those of a full micro-batch go, filled up to as many numbers.
    An exchanged value must therefore have as many numbers for each row, or be a single number or a
    parameter.

    Raises:
        InputError: something else is exchanged; names its op.
    """
    known: dict[tuple[Dim, ...], bool] = {(): True}
    live = live_ops(graph)
    for op in graph.ops:
        is_one = op.target.startswith(SPACE) and op.name in live
        is_idle = not is_one or not any(passes(graph, op, again=False))
        if is_idle or _is_weight(graph, op):
            continue
        spec = op.outputs[0]
        if spec.shape not in known:
            known[spec.shape] = _grows(spec, graph.batch)
        if not known[spec.shape]:
            raise _does_not_grow(graph, op)


def _is_weight(graph: Graph, op: Op) -> bool:
    """Whether a trained parameter is exchanged: `runtime.group` knows it when it sees it."""
    arg = op.args[0]
    return isinstance(arg, ParamRef) and graph.param[arg.param].spec.requires_grad


def _grows(spec: TensorSpec, most: int) -> bool:
    one = spec.at(1).numel
    return all(spec.at(rows).numel == rows * one for rows in range(2, most + 1))


def _does_not_grow(graph: Graph, op: Op) -> InputError:
    made = next(iter(op.refs), op.name)
    return InputError(
        f"ranks of a tensor group exchange '{made}', {op.outputs[0]}, whose size does not grow "
        "with the rows of a micro-batch, and drop_last = False lets those be fewer",
        code="BX1341",
        at=(graph.op[made].source if made in graph.op else "") or "drop_last",
        help="say drop_last = True in the model file, or name other axes by --tp-axes",
    )


def _numels(op: Op, member: int, to: int, members: int, *, backward: bool) -> tuple[int, ...]:
    """Return the numbers in a rank's messages to another: a whole tensor, its part, pieces."""
    numel, kind = op.outputs[0].numel, op.target.removeprefix(SPACE)
    if kind in ("all_reduce", "copy_to_group"):
        lengths = pieces(numel, members)
        return (lengths[to], lengths[member]) if len(lengths) > 1 else lengths
    lengths = cast("tuple[int, ...]", op.args[3])
    is_whole = kind in ("all_gather", "gather_to_group")
    one = numel // (sum(lengths) if is_whole else lengths[member])
    is_sum = kind == ("gather_to_group" if backward else "reduce_scatter")
    return (one * lengths[to if is_sum else member],)
