"""Memory of a device while each of its instructions runs: a fold over the program, without time.

Weights and optimizer state are there all the time and not counted here. These tensors count, each
from one moment to another:

    saved activations       Forward .. end of Backward (none without Backward); in the store, where
                            they are offloaded
    deferred tensors        end of Backward .. end of BackwardWeight: inputs of deferred layers,
                            gradients of their outputs
    received activations    Recv .. end of Backward (without Backward, or where it has no use for
                            one: the last reader here); the gaps that their strides leave count
    made outputs            Forward .. end of Backward (without Backward, or where it has no use for
                            one or runs the forward again: the last Send or reader)
    received gradients      Recv .. end of Backward
    made gradients          Backward .. they have left, after the last of its Sends (on the same
                            device: the reader)
    parameter gradients     first Backward of the stage, deferred ones its first BackwardWeight, ..
                            OptimizerStep; where weights lie in a store, another stage's Backward;
                            what other replicas sum of single micro-batches only while these run, a
                            bucket that is being filled and two that have left
    tied, norm, loss        Recv .. OptimizerStep
    gathered weights        with ZeRO 3: Recv .. end of the Forward or Backward that they are for,
                            each with its message at first; copies of the own ones, Send .. left
    weights in a store      a stage's first Forward or Backward .. another's, or OptimizerStep
    parts of buckets        Recv only: they are added at once; Send .. left, where they are sums of
                            their own ("micro", "tree") and not the bucket
    receives posted ahead   the next AHEAD messages of each channel from another device; over nccl,
                            where all devices are GPUs, none
    workspace               while the stage, or the optimizer, runs
    libraries' workspace    always

All of it as the device's allocator takes it: see `cuda`.

The module knows nothing of times; `simulate` adds them, and says when a message has left.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from bigbrain_fx.core import (
    DTYPE_BYTES,
    Backward,
    BackwardWeight,
    Bucket,
    Compute,
    Edge,
    EdgeKind,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stages,
)
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.gathers import nodes
from bigbrain_fx.plan.schedule.stage_part import rounded, summed_bytes, sums_parts
from bigbrain_fx.plan.schedule.walk import Working
from bigbrain_fx.planning import AHEAD


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device while one instruction runs, weights and optimizer state not counted.

    `stored_bytes` are activations in its store, and no part of the total.
    """

    gradients_bytes: int = 0
    activations_bytes: int = 0
    messages_bytes: int = 0
    stored_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.gradients_bytes + self.activations_bytes + self.messages_bytes


def held(
    program: Program, stages: Stages, costs: StageCosts, left: Mapping[Message, int] | None = None
) -> Iterator[Held]:
    """Yield what the device holds while each instruction runs, in order: the most during it.

    Args:
        program: of one device.
        stages: what it runs.
        costs: of these stages.
        left: the place in the program by which a message that it sends has left; when left out,
            that is at once.
    """
    ledger = _Ledger(program, stages, costs, left or {})
    for position, instruction in enumerate(program.instructions):
        yield ledger.entry(position, instruction)


def fixed_bytes(program: Program, costs: StageCosts) -> tuple[int, int]:
    """Return the bytes of weights, and of optimizer state where there is an OptimizerStep."""
    weights = costs.weights_bytes.get(program.device, 0)
    return weights, costs.optimizer_bytes.get(program.device, 0) if optimizes(program) else 0


def optimizes(program: Program) -> bool:
    """Whether a device has an OptimizerStep."""
    return any(isinstance(instruction, OptimizerStep) for instruction in program.instructions)


Message: TypeAlias = tuple[Edge, int | None]
_Sent: TypeAlias = tuple[int, int, Edge, int | None]
"""The place in the program by which a message has left, its number, and the message."""
_Key: TypeAlias = tuple[EdgeKind, str, int, int | None]


class _Ledger:
    """The running account of one device: tensors by key, each with how many still need it."""

    def __init__(
        self, program: Program, stages: Stages, costs: StageCosts, left: Mapping[Message, int]
    ) -> None:
        self.stages, self.costs, self._left = stages, costs, left
        self.trained = frozenset(i.stage for i in program.instructions if isinstance(i, Backward))
        self.gradients = self.activations = self.messages = self.gathered = self.stored = 0
        self._here: int | None = None  # the stage that ran last
        self._bytes: dict[_Key, int] = {}
        self._uses: Counter[_Key] = Counter()
        self._once: list[Edge] = []
        self._sent: list[_Sent] = []  # heaps: the next to leave first
        self._sent_parts: list[_Sent] = []
        self._sends = 0
        self._backwards: Counter[tuple[str, int]] = Counter()
        self._added_micros: dict[str, tuple[int, ...]] = {}  # to each bucket's sum, of parts
        self._own_parts = 0  # copies that wait until others' parts were added before them
        self._device = program.device
        self._kind = costs.cluster.device[program.device].kind
        self._libraries = costs.library_bytes.get(program.device, 0)
        self._due: dict[Edge, deque[int | None]] = {}
        for instruction in program.instructions:
            if isinstance(instruction, Recv):
                self._due.setdefault(instruction.edge, deque()).append(instruction.micro)
        ahead = self._ahead()
        is_of_pairs = stages.has_exchanges and not stages.by_backend
        self._takes_in_turn = is_of_pairs and not ahead
        for edge in self._due:
            if not (stages.gathers and edge.kind in ("gather", "reduce")):  # see `runtime.network`
                self._post(edge, ahead)

    def entry(self, position: int, instruction: Instruction) -> Held:
        """Book one instruction and return what is held while it runs."""
        match instruction:
            case Send(edge, micro):
                if edge.kind in ("reduce", "gather") and micro is not None:  # not the bucket itself
                    self._hold((replace(edge, nbytes=self._parts_bytes(edge)),), micro)
                self._send(edge, micro)
                return self._now()
        is_part = isinstance(instruction, Recv) and self._is_part(instruction.edge)
        self._let_go(position, but_parts=is_part)
        match instruction:
            case Recv(edge, micro):
                return self._recv(edge, micro)
        self.gradients, self._own_parts = self.gradients - self._own_parts, 0
        now = self._compute(instruction)
        self.gathered = 0
        return now

    def _is_part(self, edge: Edge) -> bool:
        """Whether messages are of a micro-batch's bucket, which replicas sum as it comes."""
        return edge.kind == "reduce" and self.stages.sums_each and not self.stages.by_backend

    def _send(self, edge: Edge, micro: int | None) -> None:
        """Note when a message has left."""
        self._sends += 1
        sent = self._left.get((edge, micro), 0), self._sends, edge, micro
        heapq.heappush(self._sent_parts if self._is_part(edge) else self._sent, sent)

    def _let_go(self, position: int, *, but_parts: bool) -> None:
        """Drop what was sent and has left; all that one computation made is held until its last.

        `but_parts`: replicas send theirs and wait for others' at once, so both are here.
        """
        for sent in (self._sent,) if but_parts else (self._sent, self._sent_parts):
            while sent and sent[0][0] <= position:
                _, _, edge, micro = heapq.heappop(sent)
                self._drop((edge,), micro)

    def _compute(self, instruction: Instruction) -> Held:
        self._visit(instruction.stage if isinstance(instruction, Compute) else None)
        match instruction:
            case Forward(stage, micro):
                return self._forward(stage, micro)
            case Backward(stage, micro):
                return self._backward(stage, micro)
            case BackwardWeight(stage, micro):
                return self._backward_weight(stage, micro)
        workspace = self.costs.optimizer_workspace_bytes.get(self._device, 0)
        self.gradients = max(self.gradients, self._whole_bytes())
        now = self._now(workspace)  # the optimizer step lets go of all gradients
        self._drop(self._once, None)
        self.gradients = 0
        self._backwards.clear()
        self._added_micros.clear()
        return now

    def _visit(self, stage: int | None) -> None:
        """Let another stage's gradients go, where they lie in a store with the weights."""
        if "weights" in self.stages.offload and stage != self._here:
            self.gradients = 0
        self._here = stage

    def _recv(self, edge: Edge, micro: int | None) -> Held:
        """Take a message; where its strides leave gaps, it is copied into a tensor with gaps."""
        self._post(edge, 1)
        if edge.kind == "gather" and micro is not None:
            self.gathered += rounded(edge.nbytes, self._kind)
        each = micro is not None and self.stages.sums_each  # else others' come when all are summed
        if each and edge.kind == "reduce":
            self._add_part(self.stages.bucket[edge.value], edge.target, micro or 0)
        if edge.kind in ("reduce", "gather", "across", "statistics"):  # added, or copied, at once
            now = self._now()
            self._drop((edge,), micro)
            return now
        if micro is None:
            self._once.append(edge)
        with_gaps = rounded(self.costs.gappy_bytes.get(edge, 0), self._kind)
        if not with_gaps:
            return self._now()
        self.messages += with_gaps
        now = self._now()
        key = _key(edge, micro)
        self.messages -= self._bytes[key]
        self._bytes[key] = with_gaps
        return now

    def _forward(self, stage: int, micro: int) -> Held:
        made = self.stages.out_of(stage, "activation")
        self._hold(made, micro)  # for each Send and each reader on this device
        received = self.stages.into(stage, "activation")
        if stage not in self.trained:
            now = self._now(self.costs.workspace_bytes[stage])
            self._drop(received, micro)
            return now
        working = self.costs.working_of(stage)
        if not self.stages.stages[stage].runs_again:
            self._hold(_kept(made, working), micro)  # for the stage's own Backward
        self.activations += working.saved_bytes
        self.stored += self._stored_bytes(stage)
        now = self._now(working.forward_bytes - working.saved_bytes)
        kept = () if self._puts_away(stage) else _kept(received, working)
        self._drop([edge for edge in received if edge not in kept], micro)
        return now

    def _backward(self, stage: int, micro: int) -> Held:
        self._hold(map(self._with_whole, self.stages.out_of(stage, "gradient")), micro)
        back_bytes = self._stored_bytes(stage) if self._puts_away(stage) else 0
        self.activations += back_bytes
        working = self.costs.working_of(stage)
        own_bytes = self.costs.gradient_bytes[stage] - self.costs.deferred_bytes[stage]
        now = self._added("backward", stage, own_bytes, working.backward_bytes)
        self._add_parts(stage, micro, waited=False)
        self.activations += working.waiting_bytes - working.saved_bytes - back_bytes
        self.stored -= self._stored_bytes(stage)
        if not self._puts_away(stage):
            self._drop(_kept(self.stages.into(stage, "activation"), working), micro)
        if not self.stages.stages[stage].runs_again:
            self._drop(_kept(self.stages.out_of(stage, "activation"), working), micro)
        self._drop(self.stages.into(stage, "gradient"), micro)
        return now

    def _with_whole(self, edge: Edge) -> Edge:
        """Return a gradient that is made with what it keeps: it may be a part of a larger one."""
        return replace(edge, nbytes=max(edge.nbytes, self.costs.whole_bytes.get(edge, 0)))

    def _puts_away(self, stage: int) -> bool:
        """Whether what a stage received lies in the store, from its forward until its backward."""
        return stage in self.stages.saving and self.stages.stages[stage].runs_again

    def _stored_bytes(self, stage: int) -> int:
        """Return what one micro-batch of a stage has in the store."""
        found = self.stages.saving.get(stage)
        return 0 if found is None else found.nbytes

    def _backward_weight(self, stage: int, micro: int) -> Held:
        working = self.costs.working_of(stage)
        own_bytes = self.costs.deferred_bytes[stage]
        now = self._added("weights", stage, own_bytes, working.weight_bytes)
        self._add_parts(stage, micro, waited=True)
        self.activations -= working.waiting_bytes
        return now

    def _added(self, which: str, stage: int, nbytes: int, working_bytes: tuple[int, int]) -> Held:
        """Return what is held while `nbytes` of parameter gradients are made and added up."""
        before = self._backwards[which, stage]
        self._backwards[which, stage] += 1
        if sums_parts(self.stages):
            has_sums = before or any(
                stage in self.stages.bucket[name].stages for name in self._added_micros
            )
            known = nbytes if not self.costs.working else 0  # sums alone leave them out
            return self._now(working_bytes[1 if has_sums else 0] + known)
        passing, filled_bytes = self._passing(stage), nbytes * self._filled(stage)
        if before == 0:
            self.gradients += int((1 - passing) * filled_bytes)
        return self._now(working_bytes[1 if before else 0] + int(passing * filled_bytes))

    def _parts_bytes(self, edge: Edge) -> int:
        """Return what is held while a part leaves: all of the micro-batch's bucket.

        A part is a view, and that is one tensor, which goes when the last part of it was taken.
        Parts of a tree that leave at last are views, too, of sums that are there anyway.
        """
        if edge.kind == "gather" or not self.stages.sums_each:
            return edge.nbytes
        bucket = self.stages.bucket[edge.value]
        return sum(bucket.pieces) * DTYPE_BYTES[bucket.dtype]

    def _whole_bytes(self) -> int:
        """Return what an update has of parts' sums: without ZeRO, all of them come back whole."""
        if self.stages.zero_stage or not sums_parts(self.stages):
            return 0
        own = [b for b in self.stages.buckets if self._added_micros.get(b.name)]
        return sum(rounded(sum(b.pieces) * DTYPE_BYTES[b.dtype], self._kind) for b in own)

    def _add_parts(self, stage: int, micro: int, *, waited: bool) -> None:
        """Add a micro-batch to the sums of the buckets that a computation has filled."""
        if sums_parts(self.stages):
            for bucket in self.stages.buckets:
                is_own = stage in bucket.stages
                if is_own and self.stages.waits_for(bucket.name, stage) == waited:
                    self._add_own(bucket, stage, micro)

    def _add_own(self, bucket: Bucket, stage: int, micro: int) -> None:
        """Add what was computed here; a copy of it waits until the next computation.

        Others' parts come before it. As the first it is the sum, and in a tree a node.
        """
        before = self.gradients
        self._add_part(bucket, stage, micro)
        if self.stages.sums_each:
            own = rounded(summed_bytes(self.stages, bucket, stage), self._kind)
            waiting = own - (self.gradients - before)
            self._own_parts += waiting
            self.gradients += waiting

    def _add_part(self, bucket: Bucket, stage: int, micro: int) -> None:
        """Add a micro-batch to what is summed here; a tree has several sums."""
        here = summed_bytes(self.stages, bucket, stage)
        before = self._added_micros.get(bucket.name, ())
        self._added_micros[bucket.name] = after = tuple(sorted((*before, micro)))
        is_tree = self.stages.sum_order == "tree"
        more = len(nodes(after)) - len(nodes(before)) if is_tree else int(not before)
        self.gradients += more * rounded(here, self._kind)

    def _passing(self, stage: int) -> float:
        """Return the share of a stage's gradients that is there while its backward runs only.

        Where torch's collectives sum each micro-batch by itself, the gradients that other replicas
        sum leave then.
        """
        buckets = [bucket for bucket in self.stages.buckets if stage in bucket.stages]
        if not (self.stages.sums_each and buckets):
            return 0.0
        place = self.stages.shard_of(self.stages.stages[stage].replica)
        here = sum(b.pieces[place] for b in buckets)
        return 1 - here / max(1, sum(sum(b.pieces) for b in buckets))

    def _filled(self, stage: int) -> float:
        """Return how much larger buckets are than their gradients: pieces may be filled up."""
        if not self.stages.by_backend:
            return 1.0
        buckets = [bucket for bucket in self.stages.buckets if stage in bucket.stages]
        own = sum(sum(bucket.pieces) for bucket in buckets)
        filled = (self.stages.piece_elements(b, r) for b in buckets for r in range(len(b.pieces)))
        return sum(filled) / own if own else 1.0

    def _ahead(self) -> int:
        """Return how many receives are posted ahead on a channel: see `runtime.network`."""
        kinds = {self.costs.cluster.device[name].kind for name in self.stages.devices}
        return 0 if kinds == {"cuda"} else AHEAD

    def _post(self, edge: Edge, count: int) -> None:
        """Make room for the next messages of a channel."""
        taken = self._at_once(edge)
        for _ in range(min(count, len(self._due.get(edge, ())))):
            self._hold((taken,), self._due[edge].popleft())

    def _at_once(self, edge: Edge) -> Edge:
        """Return an edge with what is here at once: over nccl many replicas' pieces come in turn.

        Elsewhere they are all posted before the first one comes.
        """
        if edge.kind not in ("reduce", "gather") or not self._takes_in_turn:
            return edge
        pieces = self.stages.piece_bytes[edge.value, edge.kind]
        own = pieces[self.stages.stages[edge.target].replica]
        return replace(edge, nbytes=own if edge.kind == "reduce" else max(pieces))

    def _hold(self, edges: Iterable[Edge], micro: int | None) -> None:
        for edge in edges:
            key = _key(edge, micro)
            if self._uses[key] == 0:
                self._bytes[key] = rounded(edge.nbytes, self._kind)
                self.messages += self._bytes[key]
            self._uses[key] += 1

    def _drop(self, edges: Iterable[Edge], micro: int | None) -> None:
        for edge in edges:
            key = _key(edge, micro)
            if self._uses[key] == 0:
                continue  # once-a-step sends, and programs that do not hold together
            self._uses[key] -= 1
            if self._uses[key] == 0:
                self.messages -= self._bytes.pop(key)
                del self._uses[key]

    def _now(self, workspace: int = 0) -> Held:
        visiting = 0 if self._here is None else self.costs.visiting_bytes[self._here]
        activations = self.activations + self.gathered + visiting + workspace + self._libraries
        return Held(self.gradients, activations, self.messages, self.stored)


def _kept(edges: Iterable[Edge], working: Working) -> list[Edge]:
    """Return those of a stage's activations that it keeps for its backward."""
    return [edge for edge in edges if edge.value not in working.lets_go]


def _key(edge: Edge, micro: int | None) -> _Key:
    """Name the tensor: an activation is one tensor for all its readers, every gradient its own."""
    return edge.kind, edge.value, -1 if edge.kind == "activation" else edge.source, micro
