"""Asynchronous steps in a row: the same instructions, each step's begun in the one before it.

    stage 0  F0 F1 F2 B0 F3 B1 F4 B2 F5 ...     F3 is of the next batch where a step has three
    stage 1  .  F0 F1 .  B0 ...

A step by itself, filled and drained, is what Programs say. Here the micro-batches of many steps
follow each other in one numbering, and the time between two updates is what a step takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bigbrain_fx.core import (
    Backward,
    Compute,
    Forecast,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stages,
)
from bigbrain_fx.plan.schedule import StageCosts
from bigbrain_fx.plan.simulate.clock import execute

_FIRST, _LAST = 3, 5  # of the steps between whose ends the time is taken: full before, none after
STEPS = _LAST + 2


def in_a_row(
    programs: Sequence[Program], stages: Stages, costs: StageCosts, forecast: Forecast
) -> Forecast:
    """Return the forecast of a step among others of its kind.

    Args:
        programs: of a step by itself: 1F1B of one stage on each device.
        stages: asynchronous.
        costs: of these stages.
        forecast: of a step by itself.
    """
    row = steps_in_a_row(programs, stages)
    spans = execute(row, stages, costs).spans
    each_s = [_between_s(program, spans[program.device]) for program in row]
    aside_s = max(costs.cluster.device[p.device].overheads.step_s for p in programs)
    step_s = max(each_s) + aside_s
    again = _count(programs) - 1 if stages.asynchronous == "stash" else 0
    devices = []
    for entry in forecast.devices:
        busy_s = entry.busy_s + again * costs.optimizer_s.get(entry.device, 0.0)
        devices.append(replace(entry, busy_s=busy_s, idle_s=max(0.0, step_s - busy_s)))
    return replace(forecast, step_s=step_s, devices=tuple(devices))


def steps_in_a_row(programs: Sequence[Program], stages: Stages) -> tuple[Program, ...]:
    """Return some steps as one: what each device does from the first, which fills the pipeline."""
    count = _count(programs)
    return tuple(Program(p.device, tuple(_instructions(p, stages, count))) for p in programs)


def _count(programs: Sequence[Program]) -> int:
    found = (i.micro for p in programs for i in p.instructions if isinstance(i, Forward))
    return 1 + max(found)


def _instructions(program: Program, stages: Stages, count: int) -> Iterator[Instruction]:
    passes, (stage,) = _passes(program), stages.of(program.device)
    ahead, last = stages.ahead(stage.index), STEPS * count

    def passed(kind: type[Compute], number: int) -> Iterator[Instruction]:
        batch, micro = divmod(number, count)
        for each in passes[kind, micro] if number < last else ():
            assert not isinstance(each, OptimizerStep)
            assert each.micro is not None, "nothing goes once a step"
            yield replace(each, micro=each.micro + batch * count)

    for number in range(ahead):
        yield from passed(Forward, number)
    for number in range(last):
        yield from passed(Forward, number + ahead)
        yield from passed(Backward, number)
        if stages.asynchronous == "stash" or (number + 1) % count == 0:
            yield OptimizerStep()


def _passes(program: Program) -> dict[tuple[type, int], list[Instruction]]:
    """Return each pass with the messages around it."""
    found: dict[tuple[type, int], list[Instruction]] = {}
    before: list[Instruction] = []
    now: list[Instruction] = []
    for instruction in program.instructions:
        match instruction:
            case Recv():
                before.append(instruction)
            case Forward(_, micro) | Backward(_, micro):
                now = found[type(instruction), micro] = [*before, instruction]
                before = []
            case Send():
                now.append(instruction)
    return found


def _between_s(program: Program, spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a step, between the ends of two."""
    pairs = zip(program.instructions, spans, strict=True)
    ends_s = [end_s for instruction, (_, end_s) in pairs if isinstance(instruction, OptimizerStep)]
    a_step = len(ends_s) // STEPS
    ends_s = ends_s[a_step - 1 :: a_step]
    return (ends_s[_LAST] - ends_s[_FIRST]) / (_LAST - _FIRST)
