"""What a device holds while each of its instructions runs: a fold over the program, without time.

Weights and optimizer state are there all the time and not counted here. What counts, and from when
to when:

    saved activations       Forward .. end of Backward (none without Backward)
    received activations    Recv .. end of Backward (without Backward: the last reader here)
    made outputs            Forward .. end of Backward (without Backward: the last Send or reader)
    received gradients      Recv .. end of Backward
    made gradients          Backward .. their Send (on the same device: the reader)
    parameter gradients     first Backward of the stage .. OptimizerStep; each later Backward makes
                            them again before it adds them up
    tied, norm messages     Recv .. OptimizerStep
    workspace               while the stage runs

It knows nothing of times; `simulate` adds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import (
    Backward,
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
from bigbrain_fx.schedule.costs import StageCosts


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device while one instruction runs, weights and optimizer state not counted."""

    gradients_bytes: int = 0
    activations_bytes: int = 0
    messages_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.gradients_bytes + self.activations_bytes + self.messages_bytes


def held(program: Program, stages: Stages, costs: StageCosts) -> Iterator[Held]:
    """Yield what the device holds while each instruction runs, in order: the most during it."""
    ledger = _Ledger(program, stages, costs)
    for instruction in program.instructions:
        yield ledger.entry(instruction)


def fixed_bytes(program: Program, costs: StageCosts) -> tuple[int, int]:
    """Return the bytes of weights, and of optimizer state where there is an OptimizerStep."""
    weights = costs.weights_bytes.get(program.device, 0)
    steps = any(isinstance(instruction, OptimizerStep) for instruction in program.instructions)
    return weights, costs.optimizer_bytes.get(program.device, 0) if steps else 0


_Key: TypeAlias = tuple[EdgeKind, str, int, int | None]


class _Ledger:
    """The running account of one device: tensors by key, each with how many still need it."""

    def __init__(self, program: Program, stages: Stages, costs: StageCosts) -> None:
        self.stages, self.costs = stages, costs
        self.trained = frozenset(i.stage for i in program.instructions if isinstance(i, Backward))
        self.gradients = self.activations = self.messages = 0
        self._bytes: dict[_Key, int] = {}
        self._uses: Counter[_Key] = Counter()
        self._has_gradient: set[int] = set()
        self._once: list[Edge] = []

    def entry(self, instruction: Instruction) -> Held:
        """Book one instruction and return what is held while it runs."""
        match instruction:
            case Recv(edge, micro):
                self._hold((edge,), micro)
                if micro is None:
                    self._once.append(edge)
                return self._now()
            case Send(edge, micro):
                now = self._now()
                self._drop((edge,), micro)
                return now
            case Forward(stage, micro):
                return self._forward(stage, micro)
            case Backward(stage, micro):
                return self._backward(stage, micro)
        now = self._now()  # the optimizer step lets go of all gradients
        self._drop(self._once, None)
        self.gradients = 0
        self._has_gradient.clear()
        return now

    def _forward(self, stage: int, micro: int) -> Held:
        made = self.stages.out_of(stage, "activation")
        self._hold(made, micro)  # for each Send and each reader on this device
        if stage in self.trained:
            self._hold(made, micro)  # for the stage's own Backward
            self.activations += self.costs.saved_bytes[stage]
        now = self._now(workspace=self.costs.workspace_bytes[stage])
        if stage not in self.trained:
            self._drop(self.stages.into(stage, "activation"), micro)
        return now

    def _backward(self, stage: int, micro: int) -> Held:
        self._hold(self.stages.out_of(stage, "gradient"), micro)
        self.gradients += self.costs.gradient_bytes[stage]
        now = self._now(workspace=self.costs.workspace_bytes[stage])
        if stage in self._has_gradient:  # added to those of earlier micro-batches
            self.gradients -= self.costs.gradient_bytes[stage]
        self._has_gradient.add(stage)
        self.activations -= self.costs.saved_bytes[stage]
        self._drop(self.stages.into(stage, "activation"), micro)
        self._drop(self.stages.out_of(stage, "activation"), micro)
        self._drop(self.stages.into(stage, "gradient"), micro)
        return now

    def _hold(self, edges: Iterable[Edge], micro: int | None) -> None:
        for edge in edges:
            key = _key(edge, micro)
            if self._uses[key] == 0:
                self._bytes[key] = edge.nbytes
                self.messages += edge.nbytes
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
        return Held(self.gradients, self.activations + workspace, self.messages)


def _key(edge: Edge, micro: int | None) -> _Key:
    """Name the tensor: an activation is one tensor for all its readers, every gradient its own."""
    return edge.kind, edge.value, -1 if edge.kind == "activation" else edge.source, micro
