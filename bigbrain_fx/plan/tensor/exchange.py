"""One exchange of a tensor group: what it sends, and when each member goes on from it.

    member 0  ██████ sends ────▶            █████    the faster one waits for what is sent to it
    member 1  ██████████████████ sends ────▶█████    the slower one finds it there, and waits not

This file knows one op, links and members' clocks; it knows no graph and no stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bigbrain_fx.core import SENT_BACKWARD, SENT_FORWARD, Cluster, Op

SPACE = "shard."
LARGE = 1 << 14  # numbers; `runtime.group` has it, too
_ADDS, _COPIES = 3, 2  # how often the bytes of a tensor move that is added to another, or copied


def pieces(numel: int, members: int) -> tuple[int, ...]:
    """Return how many numbers of a sum each member adds; one entry where each adds all of it."""
    if members == 2 or numel < LARGE:
        return (numel,)
    return tuple(numel // members + (member < numel % members) for member in range(members))


def sent_share(kind: str, numel: int, members: int) -> float:
    """Return the share of a whole tensor that a member sends each other one in an exchange."""
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
    """Return the seconds of an exchange to which all members come at once, in one pass."""
    return max(exchanged_s(op, cluster, group, [0.0] * len(group), backward=backward))


def exchanged_s(
    op: Op, cluster: Cluster, group: Sequence[str], ready_s: Sequence[float], *, backward: bool
) -> list[float]:
    """Return when each member goes on: every one sends to every other.

    Args:
        op: concrete.
        cluster: with the links.
        group: the members' devices.
        ready_s: when each of them comes to it.
        backward: in which pass.
    """
    clocks_s = list(ready_s)
    for nbytes, touched_bytes in _rounds(op, len(group), backward=backward):
        clocks_s = _round(cluster, group, nbytes, clocks_s, touched_bytes)
    return clocks_s


def sum_s(nbytes: int, cluster: Cluster, group: Sequence[str]) -> float:
    """Return the seconds of a sum of which each member sends all to every other."""
    others = len(group) - 1
    return max(_round(cluster, group, nbytes, [0.0] * len(group), others * _ADDS * nbytes))


def _rounds(op: Op, members: int, *, backward: bool) -> Iterator[tuple[int, int]]:
    """Yield the bytes that each member sends each other one, and those that it touches itself."""
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
    """Return when the last of the others' messages is there: one after another as they are sent.

    What leaves a host, or comes to it, goes through its NIC beside all else of this exchange.
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
    """Return, by who sends to a member, what the fullest NIC on the way takes for all messages."""
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
