"""What one micro-batch of a stage holds while it runs, op by op: as autograd keeps and frees.

    forward    each op holds its result and what it keeps; what nobody reads or keeps any more goes
    backward   the same ops in reverse: an op's gradients come, what only it kept goes

A stage that runs again lets go of all at its forward's end, and its backward begins with another.
What a stage makes again is gone after its last forward reader; the first backward that needs it
runs the op once more, from what the op read: that is kept. Where a stage defers, what the gradients
of its weights are made of is still held at the backward's end; the backward of weights lets go of
it layer by layer, the last one first.

It follows `Op.saves`, which capture measured, and knows storages only: a view is its base. Values
that come from elsewhere (received, from the batch, parameters) are counted by whoever holds them.
It knows no times, and no other stage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from bigbrain_fx.core import (
    DTYPE_BYTES,
    Costs,
    Edge,
    EdgeKind,
    Graph,
    ModuleCall,
    Op,
    Saves,
    Stage,
    Stages,
)
from bigbrain_fx.plan.deferring import waiting_ops
from bigbrain_fx.plan.schedule.cuda import rounded

_ASSIGNED = re.compile(r"([A-Za-z_][\w, ]*?)\s*=(?!=)")
_REMEMBERED = "_walk"  # as a cached property is: a graph is frozen, and every stage asks


@dataclass(frozen=True, slots=True)
class Working:
    """What one micro-batch of a stage holds, in bytes.

    Attributes:
        saved_bytes: stay from forward to backward; what is sent or received not counted.
        forward_bytes: the most while the forward runs, `saved_bytes` included, what it sends not.
        backward_bytes: the most while the backward of the first micro-batch, the second and any
            later one runs, on top of what is saved and of the gradients that it sends; the first's
            on top of the stage's own parameter gradients, too. Negative where what is saved is
            gone before the most is there.
        waiting_bytes: stay from a backward to the backward of weights: inputs of deferred layers,
            received ones included, and gradients of their outputs.
        weight_bytes: the most while the backward of weights runs, on top of what waits, of the
            first micro-batch, the second and any later one; the first's on top of the deferred
            parameters' own gradients, too.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: tuple[int, int, int]
    waiting_bytes: int = 0
    weight_bytes: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Part:
    """One stage of a concrete graph, on its own device."""

    graph: Graph
    stages: Stages
    stage: Stage
    costs: Costs

    @property
    def kind(self) -> str:
        """The kind of its device."""
        return self.costs.cluster.device[self.stage.device].kind

    def rounded(self, nbytes: int) -> int:
        """Return what the device's allocator takes for so many bytes."""
        return rounded(nbytes, self.kind)

    def ops(self) -> Iterator[Op]:
        """Yield its ops, in order."""
        return (self.graph.op[name] for name in self.stage.ops)

    def saves(self, op: Op) -> Saves:
        """Return what an op holds here; by the estimator's rule where nobody has measured it."""
        if op.saves is not None:
            return op.saves if self.kind == "cpu" else _on_cuda(self.graph, op, op.saves)
        if op.view_of is not None or not (op.outputs or op.mutates):
            return Saves(passed=(0,))
        cost = self.costs.op_cost(op.name, self.stage.device)
        return Saves(
            (), cost.saved_bytes, _int(op.writes_bytes) + cost.saved_bytes, cost.workspace_bytes
        )

    def result_bytes(self, op: Op) -> int:
        """Return the bytes of an op's fresh results."""
        return sum(self.rounded(spec.nbytes) for spec in op.outputs)

    def is_graded(self, op: Op) -> bool:
        """Whether the backward runs it."""
        return op.name in self.graph.graded


def walk(part: Part) -> Working:
    """Follow one stage through its forward and its backward."""
    forward = _Forward(part)
    forward.run()
    sends = {edge.value: edge.nbytes for edge in _edges(part, "activation")}
    made = sum(map(part.rounded, sends.values()))
    back = sum(part.rounded(edge.nbytes) for edge in _edges(part, "gradient"))
    again = part.stage.runs_again
    backwards = [_Backward(part, forward, micro) for micro in range(3)]
    tops = [backward.run() for backward in backwards]
    if again:
        tops = [max(forward.peak, forward.live + top) for top in tops]
    peaks = [top - back for top in tops]
    own = trained_params(part.graph, part.stage)
    first = peaks[0] - sum(map(part.rounded, own_sizes(part.stage, own)))
    saved = _written_bytes(part) if again else max(0, forward.live - made)
    most = forward.peak - made + (saved if again else 0)
    working = Working(saved, max(saved, most), (first, peaks[1], peaks[2]))
    if not part.stage.deferred:
        return working
    waiting = backwards[0].waiting
    first, second, later = (_weights_top(part, waiting, micro) for micro in range(3))
    total = sum(store.nbytes for store in _stores(waiting))
    return replace(working, waiting_bytes=total, weight_bytes=(first, second, later))


def own_sizes(stage: Stage, params: Mapping[str, int]) -> list[int]:
    """Return the bytes of the parameters whose gradients a stage's Backward makes."""
    return [nbytes for name, nbytes in params.items() if name not in stage.deferred]


@dataclass
class _Waits:
    """What the gradients of one op's weights are made of: its input, its result's gradient."""

    params: tuple[str, ...]
    stores: tuple[_Store, ...]


def _stores(waiting: list[_Waits]) -> list[_Store]:
    """Return what is held until weights' gradients are made, each storage once."""
    return list({id(store): store for waits in waiting for store in waits.stores}.values())


def _weights_top(part: Part, waiting: list[_Waits], micro: int) -> int:
    """Return the most during a backward of weights, on top of what waits; see `Working`."""
    sizes = trained_params(part.graph, part.stage)
    left = Counter(id(store) for waits in waiting for store in waits.stores)
    uses = Counter(name for waits in waiting for name in waits.params)
    live = top = 0
    made: set[str] = set()
    for waits in waiting:  # in the order of the backward: the last layer first
        for name in waits.params:
            nbytes = part.rounded(sizes[name])
            top = max(top, live + nbytes * (1 + (name in made)))
            live += 0 if name in made else nbytes
            made.add(name)
            uses[name] -= 1
            if uses[name] == 0:
                top = max(top, live + (nbytes if micro == 1 else 0))
                live -= nbytes if micro else 0
        for store in waits.stores:
            left[id(store)] -= 1
            live -= 0 if left[id(store)] else store.nbytes
    return top - (0 if micro else sum(part.rounded(sizes[name]) for name in made))


def _written_bytes(part: Part) -> int:
    """Return the bytes of the buffers that a stage writes: copies are kept for its second run."""
    names = {name for op in part.ops() for name in op.mutates if name in part.graph.param}
    canonical = {part.graph.param[name].canonical: part.graph.param[name] for name in names}
    return sum(part.rounded(param.spec.nbytes) for param in canonical.values())


def trained_params(graph: Graph, stage: Stage) -> Mapping[str, int]:
    """Return the bytes of each parameter of a stage that wants a gradient, by canonical name."""
    found = (graph.param[name] for name in stage.params)
    return {
        p.canonical: p.spec.nbytes for p in found if p.kind == "parameter" and p.spec.requires_grad
    }


def _edges(part: Part, kind: EdgeKind) -> tuple[Edge, ...]:
    return part.stages.out_of(part.stage.index, kind)


def _int(size: object) -> int:
    assert isinstance(size, int), "costs are added up over a concrete graph, graph.at(rows)"
    return size


def _on_cuda(graph: Graph, op: Op, measured: Saves) -> Saves:
    """Return what CUDA's kernels hold, where the rule says that they keep other things."""
    if measured.cuda_own_bytes is None:
        return measured
    own = _int(measured.cuda_own_bytes)
    values = measured.values if measured.cuda_values is None else measured.cuda_values
    result = sum(spec.nbytes for spec in op.outputs)
    known = (graph.op[ref] for ref in op.refs if ref in graph.op)
    back = sum(spec.nbytes for reads in known for spec in reads.outputs if spec.requires_grad)
    return Saves(values, own, own + result, back, measured.passed)


def _of_graph(graph: Graph) -> tuple[Mapping[str, str], Mapping[ModuleCall, int]]:
    """Return the storage of every value, and how many ops every call has: once for all stages."""
    known = graph.__dict__.get(_REMEMBERED)
    if known is None:
        root: dict[str, str] = {}
        for op in graph.ops:
            root[op.name] = op.name if op.view_of is None else root.get(op.view_of, op.view_of)
        known = root, Counter(call for op in graph.ops for call in op.modules)
        graph.__dict__[_REMEMBERED] = known
    found: tuple[Mapping[str, str], Mapping[ModuleCall, int]] = known
    return found


def roots_of(graph: Graph) -> Mapping[str, str]:
    """Return the value whose storage each op's result is: its own, but for views."""
    return _of_graph(graph)[0]


class _Forward:
    """One forward: what is alive, by storage.

    Attributes:
        live: bytes alive; after `run`, what stays for the backward and what is sent.
        kept_by: root -> the ops that keep its storage.
        held: root -> bytes, of the storages made here that are alive.
        keeps: op -> the roots that it keeps, itself or through what it has made again.
        asks: op -> the ops that run again for its backward.
        users: op that runs again -> what asks for its result: backwards, and other such runs.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.live = self.peak = 0
        self.held: dict[str, int] = {}
        self.kept_by: dict[str, set[str]] = {}
        self.keeps: dict[str, set[str]] = {}
        self.asks: dict[str, set[str]] = {}
        self.users: dict[str, set[str]] = {}
        self.again = frozenset(part.stage.again)
        self.root, calls = _of_graph(part.graph)
        self._variables: dict[tuple[tuple[ModuleCall, ...], str], str] = {}
        here = Counter(call for op in part.ops() for call in op.modules)
        self._cut = {call for call, count in here.items() if count < calls[call]}
        self._sent = {self.root.get(name, name) for name in part.stage.sends}
        self._last = {
            self.root.get(ref, ref): i for i, op in enumerate(part.ops()) for ref in op.refs
        }

    def run(self) -> None:
        """Follow all ops."""
        for op in self.part.ops():
            if self.part.is_graded(op):
                self._keep(op, self.part.saves(op))
        for i, op in enumerate(self.part.ops()):
            self._one(i, op)
        for root in self._variables.values():
            self.free(root)

    def _one(self, i: int, op: Op) -> None:
        saves = self.part.saves(op)
        self.peak = max(self.peak, self.live + self.part.rounded(_int(saves.forward_bytes)))
        if self.root[op.name] == op.name and op.outputs:
            self.held[op.name] = self.part.result_bytes(op)
            self.live += self.held[op.name]
        if self.part.is_graded(op) and op.name not in self.again:
            self.live += self.part.rounded(_int(saves.own_bytes))
        self.peak = max(self.peak, self.live)
        self._return_from(op)
        for name in dict.fromkeys((self.root[op.name], *map(self._root, op.refs))):
            if self._last.get(name, -1) <= i and name not in self.kept_by:
                self._read_out(name, op)

    def _keep(self, op: Op, saves: Saves) -> None:
        """Keep what an op's backward needs, or what that can be made of."""
        self.keeps[op.name], self.asks[op.name] = set(), set()
        if op.name in self.again:
            if saves.values or saves.own_bytes:
                self._ask(op.name, op)
                self.users[op.name] |= {op.name} if -1 in saves.values else set()
            return
        for name in places(op, saves):
            root = self._root(name)
            if root in self.again:
                self._ask(root, op)
                self.users[root].add(op.name)
            else:
                self._kept(root, op)

    def _ask(self, root: str, op: Op) -> None:
        """Keep what a run again reads, for an op's backward."""
        self.asks[op.name].add(root)
        self._chain(root, op)

    def _chain(self, root: str, op: Op) -> None:
        self.users.setdefault(root, set())
        for read in map(self._root, self.part.graph.op[root].refs):
            if read in self.again:
                self._chain(read, op)
                self.users[read].add(f"{root} again")
            else:
                self._kept(read, op)

    def _kept(self, root: str, op: Op) -> None:
        self.kept_by.setdefault(root, set()).add(op.name)
        self.keeps[op.name].add(root)

    def _root(self, name: str) -> str:
        return self.root.get(name, name)

    def _read_out(self, root: str, reader: Op) -> None:
        """Free a storage that nobody will read, unless a variable of the user's still has it.

        A value that another line reads has a name. It goes when the module's call ends, or when
        another value takes the name.
        """
        maker = self.part.graph.op.get(root)
        if maker is None or root not in self.held or maker.source == reader.source:
            self.free(root)
            return
        both = zip(maker.modules, reader.modules, strict=False)
        frame = tuple(a for a, b in takewhile(lambda pair: pair[0] == pair[1], both))
        self._name(frame, _variable(maker), root)

    def _name(self, frame: tuple[ModuleCall, ...], name: str, root: str) -> None:
        """Give a name to a storage; what had it goes."""
        before = self._variables.get((frame, name))
        self._variables[frame, name] = root
        if before is not None:
            self.free(before)

    def _return_from(self, op: Op) -> None:
        """End the calls that an op is not in; a call that was cut is the stage's own text."""
        for frame, name in list(self._variables):
            ended = op.modules[: len(frame)] != frame
            if ended and frame[-1] in self._cut:
                self._name((), name, self._variables.pop((frame, name)))
            elif ended or name == _variable(op):
                self.free(self._variables.pop((frame, name)))

    def free(self, root: str) -> None:
        """Let go of a storage, unless it is sent: then the ledger of messages has it."""
        if root in self.held and root not in self._sent:
            self.live -= self.held.pop(root)


def _variable(op: Op) -> str:
    """Return the name that the user's line gives to what it makes, or the op's own."""
    found = _ASSIGNED.match(op.code)
    return found[1] if found else op.name


def places(op: Op, saves: Saves) -> Iterator[str]:
    """Name the values that an op keeps."""
    refs = op.refs
    return (refs[place] if place >= 0 else op.name for place in saves.values)


@dataclass
class _Store:
    """The storage of a gradient; `users` count the values whose gradient it is."""

    nbytes: int
    users: int = 1


class _Backward:
    """One backward, after a forward: bytes on top of what was alive before it.

    `micro` 0 keeps its parameter gradients; 1 adds them to those, out of place; later ones in
    place (see runtime/device.py).
    """

    def __init__(self, part: Part, forward: _Forward, micro: int) -> None:
        self.part, self.root, self.micro = part, forward.root, micro
        self.live = self.peak = 0
        self.held = {r: n for r, n in forward.held.items() if r not in forward._sent}
        self.kept_by = {root: set(ops) for root, ops in forward.kept_by.items()}
        self.keeps, self.asks, self.again = forward.keeps, forward.asks, forward.again
        self._users = {root: set(users) for root, users in forward.users.items()}
        self._made: set[str] = set()
        self.pending: dict[str, _Store] = {}
        self.parts: dict[str, list[_Store]] = {}
        self._trained = trained_params(part.graph, part.stage)
        self._has: set[str] = set()
        self._deferred = waiting_ops(part.graph, part.stage)
        self._noted: dict[tuple[str, str], _Store] = {}  # inputs that wait, by storage and type
        self.waiting: list[_Waits] = []

    def run(self) -> int:
        """Follow all ops in reverse; return the most that was alive."""
        stage, stages = self.part.stage.index, self.part.stages
        for edge in stages.into(stage, "gradient"):
            self.pending[edge.value] = _Store(0)  # the ledger of messages has it
        if self.part.graph.loss in self.part.stage.ops:
            self.pending[str(self.part.graph.loss)] = _Store(0)
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
        self._see(self.part.rounded(_int(saves.backward_bytes)))
        self._forget(op, saves)
        for place, ref in enumerate(op.refs):
            self._hand(ref, incoming[0] if place in saves.passed else None)
        if op.name not in self._deferred:
            self._weights(op)
        for store in incoming:
            self._release(store)

    def _wait(self, op: Op, incoming: list[_Store]) -> None:
        """Keep an op's input, and its result's gradient, until its weights' gradients are made."""
        for store in incoming:
            store.users += 1
            if not store.nbytes:  # received: the ledger of messages lets go of it
                store.nbytes = self.part.result_bytes(op)
        params = {self.part.graph.param[key].canonical: None for key in op.params}
        self.waiting.append(_Waits((*params,), (*self._input(op), *incoming)))

    def _input(self, op: Op) -> Iterator[_Store]:
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
            self._noted[key] = _Store(nbytes)
            if is_cast:
                self.live += nbytes
            elif root in self.held:
                self.kept_by.setdefault(root, set()).add("backward_weight")
        yield self._noted[key]

    def _whole(self, root: str) -> int:
        maker = self.part.graph.op.get(root)
        return sum(spec.nbytes for spec in maker.outputs) if maker is not None else 0

    def _incoming(self, op: Op) -> list[_Store]:
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
        self._see(self.part.rounded(_int(saves.forward_bytes)))
        self._made.add(root)
        self.live += self.part.result_bytes(op) if self._users[root] else 0
        if self.part.is_graded(op):
            self.live += self.part.rounded(_int(saves.own_bytes))
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
            self.live -= self.part.rounded(_int(saves.own_bytes))
        for root in self.asks[op.name]:
            self._served(root, op.name)
        for root in self.keeps[op.name]:
            self.kept_by.get(root, set()).discard(op.name)
            if not self.kept_by.get(root) and root in self.held:
                self.live -= self.held.pop(root)

    def _hand(self, ref: str, passed: _Store | None) -> None:
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
            self._see(2 * nbytes if self.micro == 1 or name in self._has else nbytes)
            if self.micro == 0 and name not in self._has:
                self.live += nbytes
                self._has.add(name)

    def _new(self, nbytes: int) -> _Store:
        self.live += nbytes
        self._see(0)
        return _Store(nbytes)

    def _release(self, store: _Store) -> None:
        store.users -= 1
        if store.users == 0:
            self.live -= store.nbytes

    def _see(self, more: int) -> None:
        self.peak = max(self.peak, self.live + more)
