"""Ops of a stage that are worth recomputing: least bytes saved for the seconds it takes.

    for every price λ of a second: minimise  bytes kept + λ · seconds of ops that run again

One price is one minimum cut. An op is on the source's side where it runs once, on the sink's where
it runs again. A value is cut where it is saved, between the op that makes it and its readers:

    source ─λ·s─▶ op ─bytes─▶ value ─∞─▶ op that runs again and reads it
                  op ─own bytes─▶ own      value ─∞─▶ sink, where a backward needs it
                                             own ─∞─▶ sink

Prices are tried where the hull of the last two answers can still bend. The module knows one stage;
it chooses nothing.

Source: Jain et al., "Checkmate" (MLSys 2020) for the problem. The cut is that of AOTAutograd,
torch/_functorch/partitioners.py, with a price in place of its ban on costly ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from bigbrain_fx.core import (
    Const,
    Costs,
    Edge,
    Graph,
    Op,
    SavedInStore,
    Saves,
    Stage,
    Stages,
    leaves,
)
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.offloading import STORED_FROM_BYTES
from bigbrain_fx.plan.schedule.stage_part import Part, places, roots_of

MOST = 8
"""Choices of one stage that are minimum cuts."""
PARTS = 4
"""Between two such choices, steps: of a model's equal blocks a cut takes all or none."""
_WHOLE = 1 << 27  # all finite capacities together: they are 32-bit numbers
_NEVER = 1 << 29


@dataclass(frozen=True, slots=True)
class Choice:
    """Ops that run again, what that takes a micro-batch, and what it leaves to be kept."""

    ops: tuple[str, ...]
    seconds: float
    kept_bytes: int


def choices(part: Part) -> tuple[Choice, ...]:
    """Return what is worth making again in a stage, from nothing to all that frees memory."""
    problem = _Problem.of(part)
    nothing = problem.choice(frozenset())
    if not problem.may:
        return (nothing,)
    least = problem.cut(problem.cheap)
    found = {0: nothing, 1: least} if least.kept_bytes < nothing.kept_bytes else {0: nothing}
    if len(found) > 1:
        found |= dict(enumerate(problem.between(nothing, least, MOST - 2), 2))
    hull = sorted(found.values(), key=lambda choice: choice.seconds)
    between = (c for a, b in pairwise(hull) for c in problem.steps(a, b))
    return tuple(sorted({*hull, *between}, key=lambda choice: (choice.seconds, -choice.kept_bytes)))


def may_run_again(part: Part) -> frozenset[str]:
    """Return the ops of a stage that give the same again: no draw, no write, one fresh tensor."""
    roots = roots_of(part.graph)
    written = frozenset(roots.get(n, n) for op in part.graph.ops for n in op.mutates)
    sent = frozenset(roots.get(name, name) for name in part.stage.sends)
    return frozenset(op.name for op in part.ops() if _may(part, op, roots, written, sent))


def _may(
    part: Part, op: Op, roots: Mapping[str, str], written: frozenset[str], sent: frozenset[str]
) -> bool:
    fresh = op.view_of is None and len(op.outputs) == 1 and not op.is_tuple
    # where a tensor is made is written as another's device, which would be held for it
    somewhere = Const("device") in leaves((*op.args, *(value for _, value in op.kwargs)))
    plain = op.target.startswith("aten.") and op.body is None and not somewhere
    still = not (op.random or op.mutates or op.name in written)
    here = op.name not in (*sent, *part.stage.recomputed, part.graph.loss)
    reads = written.isdisjoint((*(roots.get(ref, ref) for ref in op.refs), *op.params))
    return fresh and plain and still and here and reads and op.saves is not None


@dataclass(frozen=True)
class _Problem:
    """One stage's values: what they take, what it takes to make them, and who needs them.

    Attributes:
        nbytes: of what is made here and not held anyway. own: of what an op saves besides.
        needs: (op, value) of which the op's backward needs the value. reads: of its forward.
        seconds: of the ops that `may` run again.
    """

    order: tuple[str, ...]
    nbytes: Mapping[str, int]
    own: Mapping[str, int]
    needs: frozenset[str]
    reads: Mapping[str, tuple[str, ...]]
    seconds: Mapping[str, float]
    saves_any: frozenset[str]
    kept_for: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(part: Part) -> _Problem:
        """Read a stage."""
        roots, ops = roots_of(part.graph), list(part.ops())
        may = may_run_again(part)
        device = part.stage.device
        held = {roots.get(name, name) for name in part.stage.sends}
        made = {op.name: part.result_bytes(op) for op in ops if roots[op.name] == op.name}
        made = {name: 0 if name in held else size for name, size in made.items()}
        graded = [(op, part.saves(op)) for op in ops if part.is_graded(op)]
        reads = {
            op.name: tuple(dict.fromkeys(r for x in op.refs if (r := roots.get(x, x)) in made))
            for op in ops
        }
        runs_s = {op.name: part.costs.op_cost(op.name, device).forward_s for op in ops}
        kept = {op.name: _kept(op, saves, roots, made) for op, saves in graded}
        return _Problem(
            tuple(op.name for op in ops),
            made,
            {op.name: part.rounded(int(saves.own_bytes)) for op, saves in graded},
            frozenset(name for names in kept.values() for name in names),
            reads,
            {name: seconds for name, seconds in runs_s.items() if name in may},
            frozenset(op.name for op, saves in graded if saves.values or saves.own_bytes),
            kept,
        )

    @property
    def may(self) -> frozenset[str]:
        """Ops that may run again."""
        return frozenset(self.seconds)

    @property
    def cheap(self) -> float:
        """A price at which all is made again that frees anything, and nothing else."""
        total_bytes = sum(self.nbytes.values()) + sum(self.own.values())
        return 1e-3 * total_bytes / max(sum(self.seconds.values()), 1e-12)

    def between(self, less: Choice, more: Choice, most: int) -> Iterator[Choice]:
        """Yield the choices on the hull between two, the largest bends first."""
        waiting = deque([(less, more)])
        while waiting and most > 0:
            a, b = waiting.popleft()
            if b.seconds - a.seconds <= 0 or a.kept_bytes - b.kept_bytes <= 0:
                continue
            price = (a.kept_bytes - b.kept_bytes) / (b.seconds - a.seconds)
            found = self.cut(price)
            inside = a.kept_bytes > found.kept_bytes > b.kept_bytes
            if inside and a.seconds < found.seconds < b.seconds:
                most -= 1
                yield found
                waiting += [(a, found), (found, b)]

    def steps(self, less: Choice, more: Choice) -> Iterator[Choice]:
        """Yield choices between two: with some of what the second makes again besides."""
        added = [name for name in more.ops if name not in less.ops]
        for part in range(1, PARTS):
            some = added[: len(added) * part // PARTS]
            found = self.choice(frozenset((*less.ops, *some)))
            inside = less.kept_bytes > found.kept_bytes > more.kept_bytes
            if inside and less.seconds < found.seconds < more.seconds:
                yield found

    def choice(self, again: frozenset[str]) -> Choice:
        """Return what some ops cost and leave, without those that nobody would ask for."""
        asked: set[str] = set()
        kept: set[str] = set()
        waiting = [
            *(op for op in self.saves_any if op in again),
            *(v for op, vs in self.kept_for.items() if op not in again for v in vs),
        ]
        while waiting:
            name = waiting.pop()
            if name in again and name not in asked:
                asked.add(name)
                waiting += self.reads[name]
            elif name not in again:
                kept.add(name)
        own = sum(size for op, size in self.own.items() if op not in asked)
        ops = tuple(name for name in self.order if name in asked)
        total = own + sum(self.nbytes[name] for name in kept)
        return Choice(ops, sum(self.seconds[name] for name in ops), total)

    def cut(self, price: float) -> Choice:
        """Return the best choice where a second is worth so many bytes."""
        edges = dict(self._edges(price))
        ends = ("source", "sink", *(name for edge in edges for name in edge))  # though all is free
        place = {name: i for i, name in enumerate(dict.fromkeys(ends))}
        flows = _max_flow(
            {(place[a], place[b]): size for (a, b), size in self._scaled(edges).items()},
            place["source"],
            place["sink"],
            len(place),
        )
        runs_once = {name for name, i in place.items() if i in flows}
        again = (name for name in self.seconds if f"op {name}" not in runs_once)
        return self.choice(frozenset(name for name in again if f"op {name}" in place))

    def _edges(self, price: float) -> Iterator[tuple[tuple[str, str], float]]:
        for name, nbytes in self.nbytes.items():
            cost = self.seconds.get(name)
            yield ("source", f"op {name}"), inf if cost is None else price * cost
            yield (f"op {name}", f"value {name}"), nbytes
            for read in self.reads[name]:
                yield (f"value {read}", f"op {name}"), inf
        for name, nbytes in self.own.items():
            if name in self.nbytes and nbytes:
                yield (f"op {name}", f"own {name}"), nbytes
                yield (f"own {name}", "sink"), inf
        for name in sorted(self.needs):
            yield (f"value {name}", "sink"), inf

    def _scaled(self, edges: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], int]:
        total = sum(size for size in edges.values() if size != inf) or 1.0
        return {
            ends: _NEVER if size == inf else int(size / total * _WHOLE) + (size > 0)
            for ends, size in edges.items()
        }


def _kept(
    op: Op, saves: Saves, roots: Mapping[str, str], made: Mapping[str, int]
) -> tuple[str, ...]:
    found = (roots.get(name, name) for name in places(op, saves))
    return tuple(dict.fromkeys(name for name in found if name in made))


def _max_flow(
    edges: Mapping[tuple[int, int], int], source: int, sink: int, count: int
) -> frozenset[int]:
    """Return the nodes on the source's side of a minimum cut."""
    import numpy as np  # with scipy: not with every import of a plan
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    rows, columns = np.array(list(edges), dtype=np.int32).T
    sizes = np.array(list(edges.values()), dtype=np.int32)
    capacity = csr_array((sizes, (rows, columns)), shape=(count, count))
    flow = maximum_flow(capacity, source, sink).flow
    left = capacity - flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = breadth_first_order(left, source, return_predecessors=False)
    return frozenset(int(i) for i in reached)


# ------------------------------------------------------------------------------------------------
# Stages -> the same with what of their activations lies in stores: which, how much, how long.
#
# A stage's activations leave it where moving them takes no longer than computing the stage:
# forward and backward; of one that runs again that is what it received. Stages that keep
# something else for their backward (what waits for weights' gradients, ops that are made again)
# keep all here, and so do those that run code of the user's own, which may write into what it has
# saved without telling autograd. `rrelu` does: autograd saves its noise, and then it is drawn.


_MAY_WRITE = ("leaf.", "opaque.", "aten.rrelu")
"""Ops that may write into what autograd has saved: what lies in a store is of before."""


def with_saved_in_stores(
    graph: Graph, stages: Stages, costs: Costs, trained: Iterable[int]
) -> Stages:
    """Say of each stage what its forward would put into the store, if activations are offloaded.

    Args:
        graph: concrete, for one micro-batch.
        stages: marked with what waits and what is recomputed.
        costs: of its ops.
        trained: stages with a backward.

    Raises:
        InputError: all stages keep theirs for another reason.
    """
    if "activations" not in stages.offload:
        return stages
    able = [stages.stages[n] for n in sorted(trained) if _is_able(graph, stages.stages[n])]
    if not able:
        raise InputError(
            "no stage's activations can lie in a store: all stages split their backward, make "
            "ops again for it, or run code of your own, or rrelu, which may write into what is "
            "saved",
            code="BX1316",
            at="--offload",
            help="leave activations out of --offload, or --delay-weight-gradients (zb-h1, zb-v, "
            "--activation-checkpointing ops) "
            "out",
        )
    saves = (_saved(Part(graph, stages, stage, costs)) for stage in able)
    return replace(stages, saves=tuple(each for each in saves if each.nbytes))


def _is_able(graph: Graph, stage: Stage) -> bool:
    if stage.runs_again:
        return not stage.deferred
    writes = any(_may_write(graph.op[name]) for name in stage.ops)
    return not (writes or stage.deferred or stage.again)


def _may_write(op: Op) -> bool:
    inner = op.body.ops if op.body else ()
    return op.target.startswith(_MAY_WRITE) or any(map(_may_write, inner))


def _saved(part: Part) -> SavedInStore:
    device, each = part.stage.device, [*_asked(part)]
    if part.stage.runs_again:
        each = [{edge.value: part.rounded(edge.nbytes) for edge in _received(part)}]
    rate = part.costs.cluster.store[device].bytes_per_s
    written = {name: nbytes for found in each for name, nbytes in found.items()}
    read_bytes = sum(sum(found.values()) for found in each)
    ops = [part.costs.op_cost(name, device) for name in part.stage.ops]
    return SavedInStore(
        part.stage.index,
        sum(written.values()),
        sum(written.values()) / rate,
        read_bytes / rate,
        sum(cost.forward_s * (1 + part.stage.runs_again) + cost.backward_s for cost in ops),
    )


def _received(part: Part) -> Iterator[Edge]:
    """Yield what comes to the stage and is worth moving."""
    edges = part.stages.into(part.stage.index, "activation")
    return (edge for edge in edges if edge.nbytes >= STORED_FROM_BYTES)


def _asked(part: Part) -> Iterator[Mapping[str, int]]:
    """Yield what each op's backward asks of the store."""
    return (part.stored(op) for op in part.ops() if part.is_graded(op))
