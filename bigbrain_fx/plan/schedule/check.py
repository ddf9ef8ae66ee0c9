"""Say whether programs can run, before anything runs: a list of named faults, empty when sound.

A Recv blocks until its message was sent; a Send never blocks. The checker reads programs only,
of any origin; it knows nothing of schedules and of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Stages,
)
from bigbrain_fx.errors import ScheduleError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.faults import (
    BackwardBeforeForward,
    Deadlock,
    DuplicateMessage,
    Finding,
    MicroOrder,
    Misplaced,
    MissingCompute,
    MissingInput,
    NothingDeferred,
    OutOfMemory,
    UnmatchedRecv,
    UnmatchedSend,
    WeightBeforeBackward,
    table,
)
from bigbrain_fx.plan.schedule.memory import fixed_bytes, held
from bigbrain_fx.plan.schedule.messages import ONCE, OnceAStep, once_a_step

SHOWN_FAULTS = 10


def check(
    programs: Sequence[Program],
    stages: Stages,
    *,
    trained: frozenset[int] | None = None,
    costs: StageCosts | None = None,
) -> list[Finding]:
    """Find every fault that keeps programs from running, or from computing the step.

    Args:
        programs: one per device.
        stages: what they run.
        trained: stages that must have a Backward; None takes those that have one somewhere, and,
            when there are any, the ends of gradient edges. How many micro-batches there are is
            read off the programs too.
        costs: with them, what each device holds is compared with its memory in their cluster.

    Returns:
        The faults: misplaced instructions, then messages, order, deadlock and memory.
    """
    findings: list[Finding] = [*_misplaced(programs, stages), *_messages(programs)]
    findings += [
        *_order(programs, stages, _trained(programs, stages, trained)),
        *_inputs(programs, stages),
    ]
    findings += _deadlocks(programs, stages)
    return [*findings, *(_memory(programs, stages, costs) if costs else ())]


def require_sound(
    programs: Sequence[Program],
    stages: Stages,
    *,
    trained: frozenset[int] | None = None,
    costs: StageCosts | None = None,
) -> None:
    """Raise ScheduleError, with the faults and a table, unless `check` finds nothing."""
    findings = check(programs, stages, trained=trained, costs=costs)
    if not findings:
        return
    more = tuple(str(finding) for finding in findings[1:SHOWN_FAULTS])
    left = len(findings) - 1 - len(more)
    is_full = isinstance(findings[0], OutOfMemory)
    raise ScheduleError(
        f"the programs cannot run: {findings[0]}",
        code="BX1307",
        notes=(
            *more,
            *((f"and {left} more",) if left else ()),
            *table(programs, findings[:1]).splitlines(),
        ),
        help="use smaller micro-batches, fewer in flight, or more devices"
        if is_full
        else "the schedule is at fault, not your model: try another --schedule, and report this",
    )


def _trained(
    programs: Sequence[Program], stages: Stages, trained: frozenset[int] | None
) -> frozenset[int]:
    if trained is not None:
        return trained
    found = frozenset(i.stage for p in programs for i in p.instructions if isinstance(i, Backward))
    ends = (end for e in stages.edges if e.kind == "gradient" for end in (e.source, e.target))
    return found | frozenset(ends) if found else found


def _cells(programs: Sequence[Program]) -> Iterator[tuple[str, int, Instruction]]:
    for program in programs:
        for position, instruction in enumerate(program.instructions):
            yield program.device, position, instruction


def _home(stages: Stages, instruction: Instruction) -> str | None:
    """Return the device that an instruction belongs to; None when any may run it."""
    match instruction:
        case Forward(stage) | Backward(stage) | BackwardWeight(stage):
            return stages.stages[stage].device
        case Send(edge):
            return stages.stages[edge.source].device
        case Recv(edge):
            return stages.stages[edge.target].device
        case OptimizerStep():
            return None


def _misplaced(programs: Sequence[Program], stages: Stages) -> Iterator[Finding]:
    for device, position, instruction in _cells(programs):
        home = _home(stages, instruction)
        is_local = isinstance(instruction, Send | Recv) and stages.is_local(instruction.edge)
        if is_local or home not in (None, device):
            yield Misplaced(device, position, instruction)


def _messages(programs: Sequence[Program]) -> Iterator[Finding]:
    sent: dict[tuple[Edge, int | None], tuple[str, int]] = {}
    received: dict[tuple[Edge, int | None], tuple[str, int]] = {}
    for device, position, instruction in _cells(programs):
        if not isinstance(instruction, Send | Recv):
            continue
        seen = sent if isinstance(instruction, Send) else received
        name = instruction.edge, instruction.micro
        if name in seen:
            yield DuplicateMessage(device, position, *name, instruction.do)
        seen.setdefault(name, (device, position))
    for name, cell in sent.items():
        if name not in received:
            yield UnmatchedSend(*cell, *name)
    for name, cell in received.items():
        if name not in sent:
            yield UnmatchedRecv(*cell, *name)


def _order(
    programs: Sequence[Program], stages: Stages, trained: frozenset[int]
) -> Iterator[Finding]:
    """Find backwards before forwards, micro-batches that do not ascend, and what never runs."""
    last: dict[tuple[str, int | Edge], int] = {}
    seen: set[Instruction] = set()
    for device, position, instruction in _cells(programs):
        if isinstance(instruction, OptimizerStep) or instruction.micro is None:
            continue
        yield from _too_early(stages, device, position, instruction, seen)
        what = instruction.edge if isinstance(instruction, Send | Recv) else instruction.stage
        channel = instruction.do, what
        if instruction.micro <= last.get(channel, -1):
            yield MicroOrder(device, position, instruction, last[channel])
        last[channel] = instruction.micro
        seen.add(instruction)
    yield from _missing(seen, stages, trained)
    for program in programs if trained else ():
        if OptimizerStep() not in program.instructions:
            yield MissingCompute(program.device, OptimizerStep())


def _too_early(
    stages: Stages, device: str, position: int, instruction: Instruction, seen: set[Instruction]
) -> Iterator[Finding]:
    """Find a backward before its forward, and one of weights before its backward or for none."""
    match instruction:
        case Backward(stage, micro) if Forward(stage, micro) not in seen:
            yield BackwardBeforeForward(device, position, stage, micro)
        case BackwardWeight(stage, micro) if not stages.stages[stage].deferred:
            yield NothingDeferred(device, position, stage, micro)
        case BackwardWeight(stage, micro) if Backward(stage, micro) not in seen:
            yield WeightBeforeBackward(device, position, stage, micro)


def _missing(
    seen: set[Instruction], stages: Stages, trained: frozenset[int]
) -> Iterator[MissingCompute]:
    count = 1 + max((i.micro for i in seen if isinstance(i, Compute)), default=0)
    for stage in stages.stages:
        micros = stages.micros_of(stage.index, count)
        wanted: list[Compute] = [Forward(stage.index, m) for m in micros]
        wanted += [Backward(stage.index, m) for m in micros if stage.index in trained]
        if stage.deferred and stage.index in trained:
            wanted += [BackwardWeight(stage.index, m) for m in micros]
        for compute in wanted:
            if compute not in seen:
                yield MissingCompute(stage.device, compute)


def _inputs(programs: Sequence[Program], stages: Stages) -> Iterator[MissingInput]:
    """Find instructions that come before what they need from their own program."""
    once = once_a_step(stages)
    for program in programs:
        seen: set[Instruction] = set()
        last_of = _last_backwards(program)
        for position, instruction in enumerate(program.instructions):
            for need in _needs(instruction, program.device, stages, last_of, once):
                if need not in seen:
                    yield MissingInput(program.device, position, instruction, need)
            seen.add(instruction)


_LastOf: TypeAlias = Mapping[tuple[int, bool], Backward | BackwardWeight]
"""The last Backward of a stage, and (True) its last BackwardWeight."""


def _last_backwards(program: Program) -> _LastOf:
    found = (i for i in program.instructions if isinstance(i, Backward | BackwardWeight))
    return {(i.stage, isinstance(i, BackwardWeight)): i for i in found}


def _needs(
    instruction: Instruction, device: str, stages: Stages, last_of: _LastOf, once: OnceAStep
) -> Iterator[Instruction]:
    """Yield what must stand before an instruction in its own program."""
    needed = ONCE if stages.zero_stage else (*ONCE, "gather")
    match instruction:
        case Forward(stage, micro):
            yield from _arrived(stages, stages.into(stage, "activation"), micro, Forward)
        case Backward(stage, micro):
            yield from _arrived(stages, stages.into(stage, "gradient"), micro, Backward)
        case Send(Edge(kind="gather")):
            return  # weights are there
        case Send(Edge(kind="reduce") as edge, micro):
            yield from _complete(stages, edge, micro, last_of)
        case Send(edge, int(micro)):
            yield (Forward if edge.kind == "activation" else Backward)(edge.source, micro)
        case Send(edge, None):
            if edge.kind == "tied":
                yield from _complete(stages, edge, None, last_of)
        case OptimizerStep():
            yield from last_of.values()
            for kind in needed:
                for other in once.get((device, kind), ()):
                    if isinstance(other, Recv):
                        yield other


def _complete(
    stages: Stages, edge: Edge, micro: int | None, last_of: _LastOf
) -> Iterator[Instruction]:
    """Yield what completes a stage's part of a sum: of one micro-batch, or of all."""
    waits = stages.waits_for(edge.value, edge.source)
    if micro is not None:
        yield (BackwardWeight if waits else Backward)(edge.source, micro)
    elif (edge.source, waits) in last_of:
        yield last_of[edge.source, waits]


def _arrived(
    stages: Stages,
    edges: Sequence[Edge],
    micro: int,
    made_by: Callable[[int, int], Forward | Backward],
) -> Iterator[Instruction]:
    for edge in edges:
        yield made_by(edge.source, micro) if stages.is_local(edge) else Recv(edge, micro)


def _deadlocks(programs: Sequence[Program], stages: Stages) -> list[Finding]:
    """Run the programs, Recv blocking, and find the circle of devices that wait for each other."""
    at = run_until_stuck(programs)
    program_of = {program.device: program for program in programs}
    waits: dict[str, Recv] = {}
    for device, position in at.items():
        if position < len(program_of[device].instructions):
            instruction = program_of[device].instructions[position]
            assert isinstance(instruction, Recv), "only a Recv blocks"
            waits[device] = instruction
    circle = _circle({d: stages.stages[recv.edge.source].device for d, recv in waits.items()})
    return [Deadlock(tuple((d, at[d], waits[d]) for d in circle))] if circle else []


def run_until_stuck(programs: Sequence[Program]) -> dict[str, int]:
    """Return how far every device comes: the position of the Recv it is stuck at, or its length."""
    at = {program.device: 0 for program in programs}
    sent: set[tuple[Edge, int | None]] = set()
    waiting: dict[tuple[Edge, int | None], Program] = {}
    runnable = list(programs)
    while runnable:
        program = runnable.pop()
        while at[program.device] < len(program.instructions):
            instruction = program.instructions[at[program.device]]
            if isinstance(instruction, Recv) and (instruction.edge, instruction.micro) not in sent:
                waiting[instruction.edge, instruction.micro] = program
                break
            if isinstance(instruction, Send):
                name = instruction.edge, instruction.micro
                sent.add(name)
                if name in waiting:
                    runnable.append(waiting.pop(name))
            at[program.device] += 1
    return at


def _circle(waits_for: Mapping[str, str]) -> list[str]:
    """Return the first circle in device -> the device it waits for; empty when there is none."""
    for start in waits_for:
        path: list[str] = []
        device = start
        while device in waits_for and device not in path:
            path.append(device)
            device = waits_for[device]
        if device in path:
            return path[path.index(device) :]
    return []


def _memory(
    programs: Sequence[Program], stages: Stages, costs: StageCosts
) -> Iterator[OutOfMemory]:
    for program in programs:
        totals = [entry.total_bytes for entry in held(program, stages, costs)]
        peak, position = max(((b, -i) for i, b in enumerate(totals)), default=(0, 0))
        peak_bytes = sum(fixed_bytes(program, costs)) + peak
        limit_bytes = costs.cluster.device[program.device].memory_bytes
        if peak_bytes > limit_bytes:
            yield OutOfMemory(program.device, -position, peak_bytes, limit_bytes)
