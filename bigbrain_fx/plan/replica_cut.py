"""A graph cut once for each replica -> one list of stages, with the edges between replicas.

    replica 0   [0] -> [1]         stages keep their order; those of replica r come after r-1's
                 |      |         a bucket: what one stage of each replica makes gradients of
    replica 1   [2] -> [3]         reduce: parts of a bucket to who sums the piece; gather: back

This file knows parameters and stages; it knows no schedule and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, permutations

from bigbrain_fx.core import DTYPE_BYTES, Bucket, Edge, EdgeKind, Graph, Placement, Stage, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.cut import cut, cut_each, graded_params, holders, live_ops, norms, updating
from bigbrain_fx.plan.replica_statistics import statistics, statistics_edges
from bigbrain_fx.plan.sums_in_half import may_be_ungiven

LEAST_BUCKET = 256 << 10
"""Bytes below which a bucket's message would cost more in latency than it hides."""
BUCKETS = 8
"""Into so many, about, the gradients of a stage are divided."""

_Ways = Callable[[EdgeKind, Sequence[int], int], Iterator[tuple[int, int, int]]]

Leaf = tuple[str, int]  # a parameter, and which of the stages that make a gradient of it


def cut_replicas(
    graph: Graph,
    placement: Placement,
    rows: int,
    *,
    clip: bool = False,
    like: Graph | None = None,
) -> Stages:
    """Cut a graph for each replica of a placement; a placement without replicas as `cut` does.

    Args:
        graph: as captured, or what a rank of tensor groups runs.
        placement: of its ops.
        rows: of a micro-batch.
        clip: as in `cut`.
        like: the first rank's graph, whose sizes say what is a bucket: all ranks have the same.

    Raises:
        InputError: replicas hold a parameter in different stages, or write what is not exchanged.
    """
    if not placement.replicas:
        return cut(graph, placement, rows, clip=clip, breaks=placement.breaks)
    return _joined(graph, placement, rows, clip, like=like or graph)


def _joined(
    graph: Graph,
    placement: Placement,
    rows: int,
    clip: bool,
    deferred: Sequence[tuple[str, ...]] = (),
    *,
    like: Graph,
) -> Stages:
    parts = cut_each(graph, placement, rows)
    firsts = [0, *accumulate(len(part.stages) for part in parts)]
    stages = tuple(
        replace(stage, index=stage.index + firsts[number], replica=number)
        for number, part in enumerate(parts)
        for stage in part.stages
    )
    if deferred:
        stages = tuple(
            replace(stage, deferred=names) for stage, names in zip(stages, deferred, strict=True)
        )
    joined = Stages(
        stages,
        (),
        tuple(dict.fromkeys(name for part in parts for name in part.moved)),
        tuple(each.micros for each in placement.replicas),
        zero_stage=placement.zero_stage,
        sum_order=placement.sum_order,
        shard_group=placement.shard_group,
    )
    written = tuple(statistics(graph, joined, rows))
    joined = replace(joined, buckets=tuple(_buckets(graph, joined, like)), statistics=written)
    updates = updating(graph, joined) if joined.zero_stage else {}
    within = [
        replace(edge, source=edge.source + firsts[number], target=edge.target + firsts[number])
        for number, part in enumerate(parts)
        for edge in part.edges
    ]
    within = [edge for edge in within if _is_taken(graph, joined, edge, updates)]
    between = (*_pieces(joined), *statistics_edges(graph, joined), *_losses(graph, joined))
    edges = (*within, *between, *(norms(graph, joined) if clip else ()))
    return replace(joined, edges=edges)


def _is_taken(graph: Graph, stages: Stages, edge: Edge, updates: Mapping[str, int]) -> bool:
    """Whether an edge within a replica is taken: gradients of tied weights are sums of all by then.

    A device of two replicas takes them in the first one that has them there; with ZeRO in that
    which updates them.
    """
    target = stages.stages[edge.target]
    if edge.kind != "tied":
        return True
    for stage in stages.of(target.device):
        held = {graph.param[name].canonical for name in stage.params}
        if stage.replica < target.replica and edge.value in held:
            return False
    own = stages.shard_of(target.replica)
    return updates.get(edge.value, own) == own


def with_waiting_buckets(
    graph: Graph,
    placement: Placement,
    rows: int,
    stages: Stages,
    *,
    clip: bool = False,
    like: Graph | None = None,
) -> Stages:
    """Sum what waits for a BackwardWeight in buckets of its own: it is there later than the rest.

    `stages` are those of `cut_replicas`, of which some defer by now; `like` is as there.
    """
    if not (stages.micros and stages.deferring):
        return stages
    waiting = [stage.deferred for stage in stages.stages]
    found = _joined(graph, placement, rows, clip, waiting, like=like or graph)
    return replace(found, stages=stages.stages)


def with_breaks(graph: Graph, placement: Placement, rows: int) -> Placement:
    """Break stages so that all replicas delay the gradients of a tied weight, or none.

    Where one replica uses such a weight in two stages, the others do, if need be on one device.
    """
    parts = cut_each(graph, placement, rows)
    stage_of = [_stage_of(part) for part in parts]
    breaks: list[list[str]] = [[] for _ in parts]
    for uses in _tied_uses(graph):
        for before, use in pairwise(uses):
            if any(of[before] != of[use] for of in stage_of):
                for number, of in enumerate(stage_of):
                    breaks[number] += [use] if of[before] == of[use] else []
    replicas = [
        replace(each, breaks=tuple(dict.fromkeys((*each.breaks, *found))))
        for each, found in zip(placement.replicas, breaks, strict=True)
    ]
    return replace(placement, replicas=tuple(replicas))


def _stage_of(stages: Stages) -> dict[str, int]:
    return {name: s.index for s in stages.stages for name in s.ops if name not in s.recomputed}


def _tied_uses(graph: Graph) -> Iterator[list[str]]:
    """Yield the ops that use each trained parameter, of those that several use, in order."""
    live = live_ops(graph)
    uses: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in dict.fromkeys(graph.param[param].canonical for param in op.params):
            if op.name in live and graph.param[name].spec.requires_grad:
                uses.setdefault(name, []).append(op.name)
    yield from (found for found in uses.values() if len(found) > 1)


# --------------------------------------------------------------------------- buckets


def _buckets(graph: Graph, stages: Stages, like: Graph) -> Iterator[Bucket]:
    """Yield what replicas sum together, in the order in which a backward pass makes it: last first.

    A bucket is of the same stages of all replicas and of one element type, and all of it or nothing
    waits for a BackwardWeight there. An eighth of what those stages have leaves at a time, so that
    most of it travels while the backward still runs.
    """
    places = [_leaves(graph, stages.of_replica(number)) for number in range(stages.replicas)]
    _require_alike(graph, stages, places)
    _require_updated(graph, stages)
    unsure = may_be_ungiven(graph)
    groups: dict[tuple[tuple[int, ...], str, bool, tuple[bool, ...]], list[str]] = {}
    for leaf in places[0]:
        name = leaf[0]
        ends = tuple(place[leaf] for place in places)
        waits = tuple(name in stages.stages[end].deferred for end in ends)
        key = ends, graph.param[name].spec.dtype, name in unsure, waits
        groups.setdefault(key, []).append(name)
    updates: dict[str, int] = {}
    number = 0
    known: dict[object, list[int]] = {}
    for key, names in sorted(groups.items(), reverse=True):
        ends, dtype, is_unsure, _ = key
        on = tuple(stages.stages[end].device for end in ends) if stages.gathers else key
        loads = known.setdefault(on, [0] * stages.shards)
        for some in _chunks(like, names):
            whole = bool(stages.zero_stage) or is_unsure
            evenly = whole and stages.sum_order == "backend"
            ordered, pieces = _divided(graph, like, some, whole, updates, loads, evenly=evenly)
            marks = len(some) if is_unsure else 0
            yield Bucket(f"bucket{number}", ends, ordered, pieces, dtype, marks)
            number += 1


def _chunks(graph: Graph, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the parameters of some stages in parts of an eighth, the last first."""
    sizes = {name: graph.param[name].spec.nbytes for name in names}
    enough = max(LEAST_BUCKET, sum(sizes.values()) // BUCKETS)
    found: list[str] = []
    for name in reversed(names):
        found.append(name)
        if sum(sizes[each] for each in found) >= enough:
            yield found
            found = []
    if found:
        yield found


def _leaves(graph: Graph, stages: Sequence[Stage]) -> dict[Leaf, int]:
    """Return the stage that makes each gradient of each trained parameter, in the model's order."""
    graded = {stage.index: graded_params(graph, stage) for stage in stages}
    found: dict[Leaf, int] = {}
    for name, held_by in holders(graph, stages).items():
        made = [stage.index for stage in held_by if name in graded[stage.index]]
        found.update({(name, place): stage for place, stage in enumerate(made)})
    return found


def _require_alike(graph: Graph, stages: Stages, places: Sequence[dict[Leaf, int]]) -> None:
    """Refuse replicas that make a parameter's gradients apart here and together there.

    Sums of them would be grouped otherwise, and no order of sums could give one result.
    """
    readers = _readers(graph)
    first = _by_name(places[0])
    for number, place in enumerate(places[1:], start=1):
        other = _by_name(place)
        for name in {**first, **other}:
            ours = [_uses(stages, s, readers[name]) for s in first.get(name, ())]
            theirs = [_uses(stages, s, readers[name]) for s in other.get(name, ())]
            if ours != theirs:
                raise InputError(
                    f"replica {number} makes the gradient of '{name}' in {len(theirs)} stages, "
                    f"replica 0 in {len(ours)}, of other uses of it",
                    code="BX1268",
                    help="cut the replicas alike: give each the same number of equal devices, or "
                    'name them under "replicas" in the cluster file',
                )


def _by_name(place: dict[Leaf, int]) -> dict[str, list[int]]:
    """Return the stages that make each parameter's gradients."""
    found: dict[str, list[int]] = {}
    for (name, _), stage in place.items():
        found.setdefault(name, []).append(stage)
    return found


def _readers(graph: Graph) -> dict[str, set[str]]:
    """Return the ops that read each parameter, by canonical name."""
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        for param in op.params:
            found.setdefault(graph.param[param].canonical, set()).add(op.name)
    return found


def _require_updated(graph: Graph, stages: Stages) -> None:
    """Refuse, with ZeRO, a device that holds a trained parameter and makes no gradient of it.

    Updated weights go to whom the gradients came from.
    """
    for number in range(stages.replicas if stages.zero_stage else 0):
        own = stages.of_replica(number)
        graded = {s.index: graded_params(graph, s) for s in own}
        for name, held_by in holders(graph, own).items():
            makers = {stage.device for stage in held_by if name in graded[stage.index]}
            for stage in held_by:
                if stages.gathers and name not in graded[stage.index]:
                    raise InputError(
                        f"'{name}' is read in stage {stage.index} where no gradient of it is made: "
                        "no bucket gathers it there",
                        code="BX1269",
                        help="use --zero 2: weights stay where they are",
                    )
                if stage.device not in makers:
                    raise InputError(
                        f"'{name}' is read on {stage.device} where no gradient of it is made, and "
                        f"with --zero {stages.zero_stage} its updates do not come there",
                        code="BX1270",
                        help="leave --zero out, or use another --partitioner",
                    )


def _uses(stages: Stages, stage: int, readers: set[str]) -> tuple[str, ...] | None:
    """Return the ops of a stage that use a tied parameter; of others there is one leaf anyway."""
    if len(readers) < 2:
        return None
    return tuple(name for name in stages.stages[stage].ops if name in readers)


def _divided(
    graph: Graph,
    like: Graph,
    names: Sequence[str],
    whole: bool,
    updates: dict[str, int],
    loads: list[int],
    *,
    evenly: bool,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the order of a bucket's parameters, and how many elements each replica sums.

    With ZeRO a parameter is `whole` in one piece, the same in all its buckets: the largest first,
    to whom has least of these stages, `evenly`: of this bucket, by the sizes in `like`. Without
    it, equal pieces wherever they end.
    """
    sizes = {name: graph.param[name].spec.numel for name in names}
    if not whole:
        total, count = sum(sizes.values()), len(loads)
        ends = [total * (number + 1) // count for number in range(count)]
        return tuple(names), tuple(b - a for a, b in zip([0, *ends], ends, strict=False))
    pieces = [0] * len(loads)
    weights = {name: like.param[name].spec.numel for name in names}
    for name in sorted(names, key=lambda name: -weights[name]):
        mine = updates.setdefault(
            name, min(range(len(loads)), key=lambda r: (evenly and pieces[r], loads[r]))
        )
        loads[mine] += weights[name]
        pieces[mine] += sizes[name]
    return tuple(sorted(names, key=updates.__getitem__)), tuple(pieces)


# --------------------------------------------------------------------------- edges


def _pieces(stages: Stages) -> Iterator[Edge]:
    """Yield the way of each piece to who sums it, and back; of an exchange, an edge a replica."""
    exchanged = _to_next if stages.by_backend else _to_one
    yield from _between(stages, exchanged if stages.has_exchanges else _to_all)
    if stages.by_backend and stages.shard_group:
        yield from _across(stages)


def piece_messages(stages: Stages) -> tuple[Edge, ...]:
    """Return the messages of a bundle's replicas that sum by themselves.

    The messages are the edges of the plan, except for exchanges. An exchange's edge is the traffic
    of a collective round its ring, or all that one of many replicas gets. A bundle in one process
    has no collectives.
    """
    if not stages.has_exchanges:
        return tuple(edge for edge in stages.edges if edge.kind in ("reduce", "gather"))
    return tuple(_between(stages, _to_all))


def _between(stages: Stages, between: _Ways) -> Iterator[Edge]:
    for (name, kind), pieces in stages.piece_bytes.items():
        ends = stages.bucket[name].stages
        for a, b, nbytes in between(kind, pieces, stages.shards):
            yield Edge(name, ends[a], ends[b], kind, nbytes)


def _to_all(kind: EdgeKind, pieces: Sequence[int], shards: int) -> Iterator[tuple[int, int, int]]:
    """Yield what each replica sends each other one: from, to, bytes.

    Each shard group sums all parts; weights come from the own one.
    """
    for a, b in permutations(range(len(pieces)), 2):
        nbytes = pieces[b if kind == "reduce" else a]
        if nbytes and (kind == "reduce" or a // shards == b // shards):
            yield a, b, nbytes


def _to_one(kind: EdgeKind, pieces: Sequence[int], _: int) -> Iterator[tuple[int, int, int]]:
    """Yield all that each replica gets of an exchange, as if the one before it had sent it."""
    others, total = len(pieces) - 1, sum(pieces)
    for place, piece in enumerate(pieces):
        nbytes = others * piece if kind == "reduce" else total - piece
        yield (place - 1) % len(pieces), place, nbytes


def _to_next(_: EdgeKind, pieces: Sequence[int], shards: int) -> Iterator[tuple[int, int, int]]:
    """Yield what each replica of a ring sends the next one: pieces of all others, of one size.

    Each shard group is a ring.
    """
    most = max(pieces)
    for a in range(len(pieces)) if most else ():
        yield a, a - a % shards + (a + 1) % shards, (shards - 1) * most


def _across(stages: Stages) -> Iterator[Edge]:
    """Yield what each replica sends round the ring of its shard's places, to sum it over groups."""
    groups = stages.replicas // stages.shards
    for bucket in stages.buckets:
        most = max(stages.piece_bytes[bucket.name, "reduce"])
        for a, end in enumerate(bucket.stages) if most else ():
            to = bucket.stages[(a + stages.shards) % stages.replicas]
            yield Edge(bucket.name, end, to, "across", 2 * (groups - 1) * most // groups)


def _losses(graph: Graph, stages: Stages) -> Iterator[Edge]:
    """Yield the way of each replica's losses to the first one."""
    assert graph.loss is not None
    spec = graph.op[graph.loss].outputs[0]
    made = [_maker(stages, number, graph.loss) for number in range(stages.replicas)]
    for number, stage in enumerate(made[1:], start=1):
        nbytes = DTYPE_BYTES[spec.dtype] * len(stages.micros[number])
        yield Edge(graph.loss, stage, made[0], "loss", nbytes)


def _maker(stages: Stages, replica: int, value: str) -> int:
    found = [s for s in stages.of_replica(replica) if value in s.ops and value not in s.recomputed]
    return found[0].index
