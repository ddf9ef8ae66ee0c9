"""Programs -> the same with ZeRO 3's messages: weights to and from other replicas, before each run.

    Recv activations, [Send own weights, Recv the others'], Forward, Send activations

A stage's weights arrive before each of its Forwards and Backwards; messages are numbered by these
turns. Replicas may have unlike orders and numbers of turns. So the programs are played through as
they are, all devices side by side, and who keeps weights sends them before the last thing that it
began when another began to need them: what was played once cannot deadlock. What is needed before a
device begins anything leaves at the beginning of its program.

This file knows instructions; it knows no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Instruction,
    Program,
    Recv,
    Send,
    Stages,
)

COMPUTES = (Forward, Backward, BackwardWeight)
_Sends = Mapping[tuple[str, int], Sequence[Send]]  # by device, and how much it has begun


def with_gathers(stages: Stages, programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return the programs with the messages of weights; without ZeRO 3, as they are."""
    if not stages.gathers:
        return tuple(programs)
    sends = _sends(stages, programs)
    return tuple(
        replace(program, instructions=tuple(_gathering(stages, program, sends)))
        for program in programs
    )


def turns_of(stages: Stages, stage: int) -> int:
    """Return how often a stage runs in a step: forward and backward, for each micro-batch."""
    return 2 * len(stages.micros_of(stage, 0))


def _sends(stages: Stages, programs: Sequence[Program]) -> _Sends:
    found: dict[tuple[str, int], list[Send]] = defaultdict(list)
    begun: Counter[str] = Counter()
    turns: Counter[int] = Counter()
    for device, stage in _played(programs):
        begun[device] += 1
        for edge in stages.into(stage, "gather"):
            sender = stages.stages[edge.source].device
            found[sender, begun[sender]].append(Send(edge, turns[stage]))
        turns[stage] += 1
    return found


def _gathering(stages: Stages, program: Program, sends: _Sends) -> Iterator[Instruction]:
    begun = 0
    turns: Counter[int] = Counter()
    yield from sends.get((program.device, 0), ())
    for instruction in program.instructions:
        if isinstance(instruction, COMPUTES):
            begun += 1
            yield from sends.get((program.device, begun), ())
            for edge in stages.into(instruction.stage, "gather"):
                yield Recv(edge, turns[instruction.stage])
            turns[instruction.stage] += 1
        yield instruction


def begun_at(program: Program) -> dict[Edge, list[int]]:
    """Return, for each edge of weights that leaves here, before which computation each Send stands.

    They count from 1; 0 is before all that the device receives.
    """
    found: dict[Edge, list[int]] = defaultdict(list)
    begun, is_first = 0, True
    for instruction in program.instructions:
        if isinstance(instruction, Send) and instruction.edge.kind == "gather":
            found[instruction.edge].append(0 if is_first else begun + 1)
        is_first = is_first and isinstance(instruction, Send)
        begun += isinstance(instruction, COMPUTES)
    return found


class _PlayedProgram:
    """One program while it is played: how far it is. Mutable."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = self.begun = 0
        self.all = sum(isinstance(i, COMPUTES) for i in program.instructions) or 1

    def advance(self, sent: set[tuple[Edge, int | None]]) -> Compute | None:
        """Run up to the next computation, and it; None where a message is not there, or at last."""
        while self.at < len(self.program.instructions):
            instruction = self.program.instructions[self.at]
            if isinstance(instruction, Recv) and (instruction.edge, instruction.micro) not in sent:
                return None
            if isinstance(instruction, Send):
                sent.add((instruction.edge, instruction.micro))
            self.at += 1
            if isinstance(instruction, COMPUTES):
                self.begun += 1
                return instruction
        return None


def _played(programs: Sequence[Program]) -> Iterator[tuple[str, int]]:
    """Yield device and stage of all that is computed, in an order in which it can be.

    A device with less to do goes on more slowly, so that all end together. What hangs is left out:
    the checker says why.
    """
    lines = [_PlayedProgram(program) for program in programs]
    sent: set[tuple[Edge, int | None]] = set()
    before = -1
    while before < (before := sum(line.at for line in lines)):
        for line in sorted(lines, key=lambda line: (line.begun + 1) / line.all):
            compute = line.advance(sent)
            if compute is not None:
                yield line.program.device, compute.stage
                break
