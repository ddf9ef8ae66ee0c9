"""The backward of one micro-batch through a stage: an op's gradients come, what only it kept goes.

Where a stage defers, what the gradients of its weights are made of still waits at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bigbrain_fx.core import DTYPE_BYTES, Op, Saves
from bigbrain_fx.plan.deferring import waiting_ops
from bigbrain_fx.plan.schedule.bucket_room import BucketRoom
from bigbrain_fx.plan.schedule.stage_part import Part, trained_params
from bigbrain_fx.plan.schedule.walk_forward import ForwardWalk


@dataclass
class GradientStore:
    """The storage of a gradient; `users` count the values whose gradient it is."""

    nbytes: int
    users: int = 1


@dataclass
class Waits:
    """What the gradients of one op's weights are made of: its input, its result's gradient."""

    params: tuple[str, ...]
    stores: tuple[GradientStore, ...]


class BackwardWalk:
    """One backward, after a forward: bytes on top of what was alive before it.

    That of the first micro-batch keeps its parameter gradients; later ones are added to those in
    place (runtime/gradients.py). Those that replicas sum are copied into buckets: `bucket_room`.
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
