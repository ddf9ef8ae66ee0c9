"""The named faults of programs: what `check` finds, where it is, and how it reads."""

from __future__ import annotations

from collections.abc import Iterable
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
    Program,
    Recv,
    Send,
)

Cell: TypeAlias = tuple[str, int]
"""A device, and a position in its program."""


def words(instruction: Instruction) -> str:
    """Return an instruction as text: "backward of stage 1, micro-batch 3"."""
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
    """Return a message as text."""
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


# ------------------------------------------------------------------------------------------------
# Print programs as a table, devices x position, with the bad cells marked.
#
#   d0  @0 |  F0.0   s0>1.0   F0.1   s0>1.1 [r1>0.0]  B0.0  ...
#
# F, B and W are forward, backward and backward of weights of stage.micro; s and r send and
# receive over an edge source>target; once-a-step messages have no micro.


WINDOW = 9  # cells of one row


def table(programs: Iterable[Program], findings: Iterable[Finding] = ()) -> str:
    """Return one row per device; long programs show the surroundings of their first bad cell."""
    bad: dict[str, list[int]] = {}
    for finding in findings:
        for device, position in finding.cells:
            bad.setdefault(device, []).append(position)
    rows = [_row(program, bad.get(program.device, [])) for program in programs]
    names = max((len(name) for name, _, _ in rows), default=0)
    starts = max((len(start) for _, start, _ in rows), default=0)
    columns = max((len(cells) for _, _, cells in rows), default=0)
    widths = [max(len(cells[i]) for _, _, cells in rows if i < len(cells)) for i in range(columns)]
    return "\n".join(
        f"{name:<{names}} {start:>{starts}} | "
        + " ".join(f"{cell:^{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip()
        for name, start, cells in rows
    )


def _row(program: Program, bad: list[int]) -> tuple[str, str, list[str]]:
    """Return the device, where its row starts, and its cells."""
    count = len(program.instructions)
    first = max(0, min(min(bad, default=0) - WINDOW // 2, count - WINDOW))
    cells = [
        f"[{cell(program.instructions[i])}]" if i in bad else f" {cell(program.instructions[i])} "
        for i in range(first, min(count, first + WINDOW))
    ]
    return program.device, f"@{first}", [*cells, "..."] if first + WINDOW < count else cells


def cell(instruction: Instruction) -> str:
    """Return an instruction in a few letters."""
    match instruction:
        case Forward(stage, micro):
            return f"F{stage}.{micro}"
        case Backward(stage, micro):
            return f"B{stage}.{micro}"
        case BackwardWeight(stage, micro):
            return f"W{stage}.{micro}"
        case Send(edge, micro) | Recv(edge, micro):
            which = "" if micro is None else f".{micro}"
            return f"{instruction.do[0]}{edge.source}>{edge.target}{which}"
        case OptimizerStep():
            return "step"
