"""The named faults of programs: what `check` finds, where it is, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Instruction,
    OptimizerStep,
    Recv,
    Send,
)

Cell: TypeAlias = tuple[str, int]
"""A device, and a position in its program."""


def words(instruction: Instruction) -> str:
    """Return an instruction in words: "backward of stage 1, micro-batch 3"."""
    match instruction:
        case Forward(stage, micro) | Backward(stage, micro):
            return f"{instruction.do} of stage {stage}, micro-batch {micro}"
        case BackwardWeight(stage, micro):
            return f"backward of the weights of stage {stage}, micro-batch {micro}"
        case Send(edge, micro) | Recv(edge, micro):
            which = "" if micro is None else f", micro-batch {micro}"
            return f"{instruction.do} of {edge}{which}"
        case OptimizerStep():
            return "optimizer step"


def message(edge: Edge, micro: int | None) -> str:
    """Return a message in words."""
    return f"{edge}" if micro is None else f"{edge}, micro-batch {micro}"


@dataclass(frozen=True, slots=True)
class FaultAt:
    """Something that is wrong at one instruction of a device's program."""

    device: str
    position: int

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The places to mark in the table."""
        return ((self.device, self.position),)


@dataclass(frozen=True, slots=True)
class UnmatchedSend(FaultAt):
    """A message is sent that nobody receives."""

    edge: Edge
    micro: int | None

    def __str__(self) -> str:
        return (
            f"device '{self.device}' sends {message(self.edge, self.micro)}, but nobody receives it"
        )


@dataclass(frozen=True, slots=True)
class UnmatchedRecv(FaultAt):
    """A device waits for a message that nobody sends."""

    edge: Edge
    micro: int | None

    def __str__(self) -> str:
        what = message(self.edge, self.micro)
        return f"device '{self.device}' waits for {what}, but nobody sends it"


@dataclass(frozen=True, slots=True)
class DuplicateMessage(FaultAt):
    """A message is sent or received a second time; `do` is "send" or "recv"."""

    edge: Edge
    micro: int | None
    do: str

    def __str__(self) -> str:
        verb = "sends" if self.do == "send" else "receives"
        return f"device '{self.device}' {verb} {message(self.edge, self.micro)} a second time"


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Devices wait in a circle: each for a message of the next, the last for one of the first."""

    waiting: tuple[tuple[str, int, Recv], ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The places to mark in the table."""
        return tuple((device, position) for device, position, _ in self.waiting)

    def __str__(self) -> str:
        parts = (
            f"'{device}' waits for {message(r.edge, r.micro)}" for device, _, r in self.waiting
        )
        return f"deadlock: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True)
class OutOfMemory(FaultAt):
    """A device holds more than it has; `position` is the instruction at which it holds most."""

    peak_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"device '{self.device}' needs {self.peak_bytes / 2**30:.2f} GiB "
            f"but has {self.limit_bytes / 2**30:.2f} GiB"
        )


@dataclass(frozen=True, slots=True)
class BackwardBeforeForward(FaultAt):
    """A backward comes before the forward of the same stage and micro-batch, or without one."""

    stage: int
    micro: int

    def __str__(self) -> str:
        what = words(Backward(self.stage, self.micro))
        return f"device '{self.device}' runs {what} before its forward"


@dataclass(frozen=True, slots=True)
class WeightBeforeBackward(FaultAt):
    """Weights' gradients are made before the backward that they wait for, or without one."""

    stage: int
    micro: int

    def __str__(self) -> str:
        what = words(BackwardWeight(self.stage, self.micro))
        return f"device '{self.device}' runs {what} before its backward"


@dataclass(frozen=True, slots=True)
class NothingDeferred(FaultAt):
    """A stage makes gradients of weights apart, though none of its parameters waits for that."""

    stage: int
    micro: int

    def __str__(self) -> str:
        what = words(BackwardWeight(self.stage, self.micro))
        return f"device '{self.device}' runs {what}, but no gradient of that stage waits for it"


@dataclass(frozen=True, slots=True)
class MicroOrder(FaultAt):
    """Micro-batches of one stage, or of one channel, are not strictly ascending."""

    instruction: Instruction
    after_micro: int

    def __str__(self) -> str:
        return (
            f"micro-batches must ascend, but device '{self.device}' runs {words(self.instruction)} "
            f"after micro-batch {self.after_micro}"
        )


@dataclass(frozen=True, slots=True)
class MissingCompute:
    """A device never runs a forward, a backward or the optimizer step that it must run."""

    device: str
    instruction: Compute | OptimizerStep

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Nothing to mark: the instruction is not there."""
        return ()

    def __str__(self) -> str:
        return f"device '{self.device}' never runs {words(self.instruction)}"


@dataclass(frozen=True, slots=True)
class MissingInput(FaultAt):
    """An instruction comes before something that it needs from its own program, or without it."""

    instruction: Instruction
    needs: Instruction

    def __str__(self) -> str:
        return (
            f"device '{self.device}' runs {words(self.instruction)} "
            f"without {words(self.needs)} before it"
        )


@dataclass(frozen=True, slots=True)
class Misplaced(FaultAt):
    """An instruction stands on a device that has no part in it, or messages its own device."""

    instruction: Instruction

    def __str__(self) -> str:
        return f"device '{self.device}' has no part in {words(self.instruction)}"


Finding: TypeAlias = (
    UnmatchedSend
    | UnmatchedRecv
    | DuplicateMessage
    | Deadlock
    | OutOfMemory
    | BackwardBeforeForward
    | MicroOrder
    | NothingDeferred
    | WeightBeforeBackward
    | MissingCompute
    | MissingInput
    | Misplaced
)
