"""Memory of one micro-batch of a stage while it runs, op by op: as autograd saves and frees.

    forward    each op holds its result and saved values; values without a further reader go
    backward   the same ops in reverse: an op's gradients come, values saved for it alone go

A stage that runs again lets go of all at its forward's end, and its backward begins with another. A
recomputed value is gone after its last forward reader. The first backward that needs it runs the op
once more, from the op's inputs, which are saved. Where a stage defers, the inputs of its weights'
gradients are still held at the backward's end. The backward of weights frees them layer by layer,
the last one first.

The module follows `Op.saves`, which capture measured, and knows storages only: a view is its base.
Values that come from elsewhere (received, from the batch, parameters) count at their owner. The
module knows no times, and no other stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import DTYPE_BYTES, EdgeKind, Op, Saves, Stage
from bigbrain_fx.plan.recompute import waiting_ops
from bigbrain_fx.plan.schedule.stage_part import (
    BucketRoom,
    Part,
    own_buckets,
    sums_parts,
    trained_params,
    wholes,
)
from bigbrain_fx.plan.schedule.walk_forward import ForwardWalk

_KNOWN = "_walked"  # as a cached property is: a graph is frozen


@dataclass(frozen=True, slots=True)
class Working:
    """Memory of one micro-batch of a stage, in bytes.

    Attributes:
        saved_bytes: stay from forward to backward; messages not counted.
        forward_bytes: the most while the forward runs, `saved_bytes` included, its messages not.
        backward_bytes: peak in the backward of the first micro-batch, and of a later one, on top of
            saved values and of the gradients that it sends. The first's is on top of
            the stage's own parameter gradients, too, except those of which replicas sum parts
            (`bucket_room.sums_parts`). Negative where saved values are freed before the peak.
        waiting_bytes: stay from a backward to the backward of weights: inputs of deferred layers,
            received ones included, and gradients of their outputs.
        weight_bytes: the most while the backward of weights runs, on top of waiting tensors, of the
            same two. The first's is on top of the deferred parameters' own gradients, too.
        lets_go: values that it receives or sends and that its backward has no use for.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: tuple[int, int]
    waiting_bytes: int = 0
    weight_bytes: tuple[int, int] = (0, 0)
    lets_go: frozenset[str] = frozenset()


def walked(part: Part) -> Working:
    """Return what `walk` does, each stage followed once: replicas and trials have the same ones."""
    known = part.graph.__dict__.setdefault(_KNOWN, {})
    costs = part.costs.ops[part.stage.device]
    key = _key(part, id(costs))
    if key not in known:
        known[key] = walk(part), costs  # held, so that its id stays its own
    found: Working = known[key][0]
    return found


def _key(part: Part, costs: int) -> tuple[object, ...]:
    """Return all that a walk depends on, names and numbers of the stage left out."""
    stage, stages = part.stage, part.stages
    ways: tuple[EdgeKind, ...] = ("activation", "gradient")
    sent = tuple(tuple((e.value, e.nbytes) for e in part.edges(kind)) for kind in ways)
    back = tuple(edge.value for edge in stages.into(stage.index, "gradient"))
    kept = tuple((e.value, n) for e, n in wholes(part.graph, stages, part.edges("gradient")))
    alike = replace(stage, index=0, device="", replica=0, member=0)
    return alike, costs, part.kind, part.stores, sent, back, kept, _summed(part)


def _summed(part: Part) -> tuple[object, ...]:
    """Return what a walk needs of a stage's buckets, which is the same in all replicas."""
    stages, own = part.stages, own_buckets(part)
    sizes = tuple((b.params, sum(b.pieces), max(b.pieces), b.dtype) for b in own)
    return (sizes, stages.sum_order, stages.sums_each) if own else ()


def walk(part: Part) -> Working:
    """Follow one stage through its forward and its backward."""
    forward = ForwardWalk(part)
    forward.run()
    sends = {edge.value: edge.nbytes for edge in part.edges("activation")}
    made = sum(map(part.rounded, sends.values()))
    kept = dict(wholes(part.graph, part.stages, part.edges("gradient")))  # as the ledger books them
    back = sum(part.rounded(max(e.nbytes, kept.get(e, 0))) for e in part.edges("gradient"))
    again = part.stage.runs_again
    backwards = [BackwardWalk(part, forward, is_first=first) for first in (True, False)]
    tops = [backward.run() for backward in backwards]
    if again:
        tops = [max(forward.peak, forward.live + top) for top in tops]
    peaks = [top - back for top in tops]
    own = trained_params(part.graph, part.stage)
    first = peaks[0] - _booked(part, own_sizes(part.stage, own))
    saved = _written_bytes(part) if again else max(0, forward.live - made)
    most = forward.peak - made + (saved if again else 0)
    idle = frozenset(_lets_go(part, forward))
    working = Working(saved, max(saved, most), (first, peaks[1]), lets_go=idle)
    if not part.stage.deferred:
        return working
    waiting = backwards[0].waiting
    first, later = (_weights_top(part, waiting, is_first=first) for first in (True, False))
    total = sum(store.nbytes for store in _stores(waiting))
    return replace(working, waiting_bytes=total, weight_bytes=(first, later))


def _lets_go(part: Part, forward: ForwardWalk) -> Iterator[str]:
    """Yield what a stage receives or sends that wants no gradient, and that no backward reads.

    One that runs again keeps all that it received.
    """
    received = () if part.stage.runs_again else part.stage.receives
    for name in (*received, *part.stage.sends):
        is_kept = forward.root.get(name, name) in forward.kept_by
        if not is_kept and not any(spec.requires_grad for spec in part.graph.op[name].outputs):
            yield name


def _booked(part: Part, sizes: Iterable[int]) -> int:
    """Return the gradients that the ledger has from the first backward on: not single parts."""
    return 0 if own_buckets(part) and sums_parts(part.stages) else sum(map(part.rounded, sizes))


def own_sizes(stage: Stage, params: Mapping[str, int]) -> list[int]:
    """Return the bytes of the parameters whose gradients a stage's Backward makes."""
    return [nbytes for name, nbytes in params.items() if name not in stage.deferred]


def _stores(waiting: list[Waits]) -> list[GradientStore]:
    """Return what is held until weights' gradients are made, each storage once."""
    return list({id(store): store for waits in waiting for store in waits.stores}.values())


def _weights_top(part: Part, waiting: list[Waits], *, is_first: bool) -> int:
    """Return the most during a backward of weights, on top of what waits; see `Working`."""
    sizes = trained_params(part.graph, part.stage)
    left = Counter(id(store) for waits in waiting for store in waits.stores)
    uses = Counter(name for waits in waiting for name in waits.params)
    live = top = 0
    made: set[str] = set()
    room = BucketRoom(part, is_first=is_first)
    for waits in waiting:  # in the order of the backward: the last layer first
        for name in waits.params:
            nbytes = part.rounded(sizes[name])
            top = max(top, live + nbytes * (1 + (name in made)))
            live += 0 if name in made else nbytes
            made.add(name)
            uses[name] -= 1
            if uses[name] == 0 and name in room:
                top = max(top, live + room.take(name))
                live += room.done(name) - nbytes
            elif uses[name] == 0:
                live -= 0 if is_first else nbytes
        for store in waits.stores:
            left[id(store)] -= 1
            live -= 0 if left[id(store)] else store.nbytes
    return top - (_booked(part, (sizes[name] for name in made)) if is_first else 0)


def _written_bytes(part: Part) -> int:
    """Return the bytes of the buffers that a stage writes: copies are kept for its second run."""
    names = {name for op in part.ops() for name in op.mutates if name in part.graph.param}
    canonical = {part.graph.param[name].canonical: part.graph.param[name] for name in names}
    return sum(part.rounded(param.spec.nbytes) for param in canonical.values())


# ------------------------------------------------------------------------------------------------
# The backward of one micro-batch through a stage: an op's gradients come, what only it kept goes.
#
# Where a stage defers, what the gradients of its weights are made of still waits at its end.


@dataclass
class GradientStore:
    """The storage of a gradient; `users` count the values whose gradient it is."""

    nbytes: int
    users: int = 1


@dataclass
class Waits:
    """Inputs of the gradients of one op's weights: its input, its result's gradient."""

    params: tuple[str, ...]
    stores: tuple[GradientStore, ...]


class BackwardWalk:
    """One backward, after a forward: bytes on top of what was alive before it.

    The backward of the first micro-batch keeps its parameter gradients; later ones are added to
    them in place (runtime/gradients.py). Gradients that replicas sum are copied into buckets:
    `bucket_room`.
    """

    def __init__(self, part: Part, forward: ForwardWalk, *, is_first: bool) -> None:
        self.part, self.root, self.forward, self.is_first = part, forward.root, forward, is_first
        self.live = self.peak = 0
        self.held = {r: n for r, n in forward.held.items() if r not in forward.sent}
        self.kept_by = {root: set(ops) for root, ops in forward.kept_by.items()}
        self.keeps, self.asks, self.again = forward.keeps, forward.asks, forward.again
        self._users = {root: set(users) for root, users in forward.users.items()}
        self._made: set[str] = set()
        self.pending: dict[str, GradientStore] = {}
        self.parts: dict[str, list[GradientStore]] = {}
        self._trained = trained_params(part.graph, part.stage)
        self._has: set[str] = set()
        self._buckets = BucketRoom(part, is_first=is_first)
        self._uses = _uses(part)
        self._deferred = waiting_ops(part.graph, part.stage)
        self._noted: dict[
            tuple[str, str], GradientStore
        ] = {}  # inputs that wait, by storage and type
        self.waiting: list[Waits] = []

    def run(self) -> int:
        """Follow all ops in reverse; return the most that was alive."""
        stage, stages = self.part.stage.index, self.part.stages
        for edge in stages.into(stage, "gradient"):
            self.pending[edge.value] = GradientStore(0)  # the ledger of messages has it
        if self.part.graph.loss in self.part.stage.ops:
            self.pending[str(self.part.graph.loss)] = GradientStore(0)
        for op in reversed(list(self.part.ops())):
            if self.part.is_graded(op):
                self._one(op)
        return self.peak

    def _one(self, op: Op) -> None:
        incoming = self._incoming(op)
        if not incoming:
            return
        if op.target == "operator.getitem":  # a place in its maker's list of gradients
            self.parts.setdefault(op.refs[0], []).extend(incoming)
            return
        saves = self.part.saves(op)
        if op.name in self._deferred:
            self._wait(op, incoming)
        for root in [root for root in self.part.stage.again if root in self.asks[op.name]]:
            self._make(root)
        fetched = sum(self.forward.stored[op.name].values())
        self._see(self._backward_bytes(op, saves) + fetched)
        self._forget(op, saves)
        for place, ref in enumerate(op.refs):
            self._hand(ref, incoming[0] if place in saves.passed else None)
        if op.name not in self._deferred:
            self._weights(op)
        for store in incoming:
            self._release(store)

    def _backward_bytes(self, op: Op, saves: Saves) -> int:
        """Return the most that an op's backward holds; without gradients of weights that wait."""
        nbytes = self.part.rounded(saves.backward_bytes)
        if op.name not in self._deferred:
            return nbytes
        names = {self.part.graph.param[key].canonical for key in op.params}
        return max(0, nbytes - sum(self.part.rounded(self._trained.get(n, 0)) for n in names))

    def _wait(self, op: Op, incoming: list[GradientStore]) -> None:
        """Keep an op's input, and its result's gradient, until its weights' gradients are made."""
        for store in incoming:
            store.users += 1
            if not store.nbytes:  # received: the ledger of messages lets go of it
                store.nbytes = self.part.result_bytes(op)
        params = {self.part.graph.param[key].canonical: None for key in op.params}
        self.waiting.append(Waits((*params,), (*self._input(op), *incoming)))

    def _input(self, op: Op) -> Iterator[GradientStore]:
        """Yield the storage of an op's input; one of the batch is the data's own."""
        graph, ref = self.part.graph, op.refs[0]
        if ref not in graph.op:
            return
        spec, root = graph.op[ref].outputs[0], self.root.get(ref, ref)
        is_cast = graph.autocast is not None and op.outputs[0].dtype != spec.dtype
        key = root, op.outputs[0].dtype if is_cast else ""
        if key not in self._noted:
            nbytes = self.part.rounded(
                spec.numel * DTYPE_BYTES[op.outputs[0].dtype] if is_cast else self._whole(root)
            )
            self._noted[key] = GradientStore(nbytes)
            if is_cast:
                self.live += nbytes
            elif root in self.held:
                self.kept_by.setdefault(root, set()).add("backward_weight")
        yield self._noted[key]

    def _whole(self, root: str) -> int:
        maker = self.part.graph.op.get(root)
        return sum(spec.nbytes for spec in maker.outputs) if maker is not None else 0

    def _incoming(self, op: Op) -> list[GradientStore]:
        found = self.parts.pop(op.name, [])
        if op.name in self.pending:
            found.append(self.pending.pop(op.name))
        return found

    def _make(self, root: str) -> None:
        """Run an op once more: its result stays until nobody asks, what it saves until its turn."""
        if root in self._made:
            return
        op = self.part.graph.op[root]
        reads = [name for ref in op.refs if (name := self.root.get(ref, ref)) in self.again]
        for name in dict.fromkeys(reads):
            self._make(name)
        saves = self.part.saves(op)
        self._see(self.part.rounded(saves.forward_bytes))
        self._made.add(root)
        self.live += self.part.result_bytes(op) if self._users[root] else 0
        if self.part.is_graded(op):
            self.live += self.part.rounded(saves.own_bytes)
        self._see(0)
        for name in dict.fromkeys(reads):
            self._served(name, f"{root} again")

    def _served(self, root: str, user: str) -> None:
        """Let go of a result when its last user has it no more."""
        if user in self._users[root]:
            self._users[root].remove(user)
            if not self._users[root] and root in self._made:
                self.live -= self.part.result_bytes(self.part.graph.op[root])

    def _forget(self, op: Op, saves: Saves) -> None:
        if op.name not in self.again or op.name in self._made:
            self.live -= self.forward.own_bytes(op, saves)
        for root in self.asks[op.name]:
            self._served(root, op.name)
        for root in self.keeps[op.name]:
            self.kept_by.get(root, set()).discard(op.name)
            if not self.kept_by.get(root) and root in self.held:
                self.live -= self.held.pop(root)

    def _hand(self, ref: str, passed: GradientStore | None) -> None:
        """Give a value its gradient; where it has one from another reader, add the two up."""
        nbytes = self._gradient_bytes(ref)
        if nbytes is None:
            return
        store = passed or self._new(nbytes)
        store.users += passed is not None
        other = self.pending.get(ref)
        if other is not None:
            total = self._new(nbytes)
            self._release(other)
            self._release(store)
            store = total
        self.pending[ref] = store

    def _gradient_bytes(self, ref: str) -> int | None:
        graph = self.part.graph
        here = ref in self.part.stage.ops or ref in self.part.stage.receives
        if not here or ref not in graph.graded:
            return None
        return self.part.result_bytes(graph.op[ref])

    def _weights(self, op: Op) -> None:
        for name in {self.part.graph.param[key].canonical for key in op.params}:
            nbytes = self.part.rounded(self._trained.get(name, 0))
            if name in self._buckets:
                self._fill(name, nbytes)
                continue
            self._sum(name, nbytes)

    def _sum(self, name: str, nbytes: int) -> None:
        """Make a gradient; with that of its last use it is added to the step's sum, which stays."""
        has = name in self._has
        self._see(nbytes * (1 + has))
        self._has.add(name)
        self._uses[name] -= 1
        self.live += 0 if has else nbytes
        if not self.is_first and not self._uses[name]:
            self.live -= nbytes

    def _fill(self, name: str, nbytes: int) -> None:
        """Make a gradient; put it into its bucket when its last use has added to it."""
        before = nbytes if name in self._has else 0
        self._see(nbytes)
        self._has.add(name)
        self._uses[name] -= 1
        if self._uses[name]:
            self.live += nbytes - before
            return
        self.live += self._buckets.take(name)
        self._see(nbytes - before)
        self.live += self._buckets.done(name) - before
        self._see(0)

    def _new(self, nbytes: int) -> GradientStore:
        self.live += nbytes
        self._see(0)
        return GradientStore(nbytes)

    def _release(self, store: GradientStore) -> None:
        store.users -= 1
        if store.users == 0:
            self.live -= store.nbytes

    def _see(self, more: int) -> None:
        self.peak = max(self.peak, self.live + more)


def _uses(part: Part) -> Counter[str]:
    """Return how many ops of a stage give each parameter a part of its gradient."""
    param = part.graph.param
    graded = (op for op in part.ops() if part.is_graded(op))
    return Counter(name for op in graded for name in {param[key].canonical for key in op.params})
