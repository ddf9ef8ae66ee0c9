"""Programs x StageCosts -> Forecast: how long a step takes, who is busy, what each device holds."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Compute,
    DeviceForecast,
    Edge,
    Forecast,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Slice,
    Stages,
)
from bigbrain_fx.plan.schedule import Held, StageCosts, fixed_bytes, held, optimizes
from bigbrain_fx.plan.simulate.clock import Execution, execute
from bigbrain_fx.plan.simulate.messages import Flight


def simulate(
    programs: Sequence[Program], stages: Stages, costs: StageCosts, *, timeline: bool = True
) -> Forecast:
    """Run the programs in simulated time, exactly as they are.

    Args:
        programs: one per device.
        stages: what they run.
        costs: of these stages, at the micro-batch of these programs; `stage_costs` makes them.
        timeline: whether to keep every bar, and what is held when; a search that compares
            thousands of plans need not.

    Returns:
        Seconds for one step; per device what it computes, and what it holds at its peak. The parts
        add up to `peak_bytes`; workspace counts as activations. The timeline has one bar for each
        computation and, on "a->b", one for the time that each message occupies its link.

    Raises:
        ScheduleError: the programs cannot run; shows them.
    """
    execution = execute(programs, stages, costs)
    step_s, sent = execution.step_s, _sent(programs, stages, execution)
    devices = tuple(
        _device(program, stages, costs, execution, step_s, sent.get(program.device, ()), timeline)
        for program in programs
    )
    bars = tuple(_bars(programs, stages, execution)) if timeline else ()
    return Forecast(step_s, devices, bars)


def _device(
    program: Program,
    stages: Stages,
    costs: StageCosts,
    execution: Execution,
    step_s: float,
    sent: Sequence[Flight],
    timeline: bool,
) -> DeviceForecast:
    entries = [*held(program, stages, costs, _left(program, execution, sent))]
    peak = max(entries, key=lambda entry: entry.total_bytes, default=Held())
    weights_bytes, optimizer_bytes = fixed_bytes(program, costs)
    spans = execution.spans[program.device]
    busy_s = sum(
        end_s - start_s
        for instruction, (start_s, end_s) in zip(program.instructions, spans, strict=True)
        if _computes(instruction)
    )
    always_bytes = weights_bytes + optimizer_bytes
    over_time = (
        (start_s, always_bytes + entry.total_bytes)
        for (start_s, _), entry in zip(spans, entries, strict=True)
    )
    return DeviceForecast(
        device=program.device,
        busy_s=busy_s,
        idle_s=step_s - busy_s,
        peak_bytes=always_bytes + peak.total_bytes,
        weights_bytes=weights_bytes,
        gradients_bytes=peak.gradients_bytes,
        optimizer_bytes=optimizer_bytes,
        activations_bytes=peak.activations_bytes,
        messages_bytes=peak.messages_bytes,
        held=tuple(over_time) if timeline else (),
        **_stored(program, stages, costs, entries),
    )


def _stored(
    program: Program, stages: Stages, costs: StageCosts, entries: Sequence[Held]
) -> Mapping[str, Any]:
    """Return the most that lies in a device's store, and what moving it takes of a step."""
    updates, saving = optimizes(program), stages.saving
    state_bytes = costs.stored_bytes.get(program.device, 0) if updates else 0
    state_s = costs.stored_s.get(program.device, 0.0) if updates else 0.0
    runs = (i.stage for i in program.instructions if isinstance(i, Backward) and i.stage in saving)
    each_s = (saving[stage].write_s + saving[stage].read_s for stage in runs)
    most = max((entry.stored_bytes for entry in entries), default=0)
    return {"stored_bytes": state_bytes + most, "moved_s": sum(each_s, state_s)}


def _sent(
    programs: Sequence[Program], stages: Stages, execution: Execution
) -> Mapping[str, Sequence[Flight]]:
    """Return what each device sends.

    With ZeRO 3 parts and weights leave when they are taken; until then the sender has them, and
    what of the kind it sent to that device after them: it lets go of those in turn. Processes are
    not in step as clocks say: who takes them is counted as one computation late.
    """
    in_turn = stages.gathers and not stages.by_backend
    taken_s = dict(_taken_s(programs, execution)) if in_turn else {}
    found: dict[str, list[Flight]] = {}
    turn_s: dict[tuple[str, str, str], float] = {}
    for flight in execution.flights:
        sender, receiver = (
            stages.stages[end].device for end in (flight.edge.source, flight.edge.target)
        )
        if in_turn:
            queue = sender, receiver, flight.edge.kind
            taken = taken_s.get((flight.edge, flight.micro), 0.0)
            turn_s[queue] = max(flight.free_s, taken, turn_s.get(queue, 0.0))
            flight = replace(flight, free_s=turn_s[queue])
        found.setdefault(sender, []).append(flight)
    return found


def _taken_s(
    programs: Sequence[Program], execution: Execution
) -> Iterator[tuple[tuple[Edge, int | None], float]]:
    """Yield when parts and weights have been received at the latest: a computation later."""
    for program in programs:
        pairs = [*zip(program.instructions, execution.spans[program.device], strict=True)]
        lasts_s = (end_s - start_s for i, (start_s, end_s) in pairs if isinstance(i, Compute))
        late_s = max(lasts_s, default=0.0)
        for instruction, (_, end_s) in pairs:
            if isinstance(instruction, Recv) and instruction.edge.kind in ("reduce", "gather"):
                yield (instruction.edge, instruction.micro), end_s + late_s


def _left(
    program: Program, execution: Execution, sent: Sequence[Flight]
) -> Mapping[tuple[Edge, int | None], int]:
    """Return, for each message that it sends, from which place on it is not held any more.

    That begins after it has left; a forward, which holds the most at its end, half way.
    """
    spans = zip(program.instructions, execution.spans[program.device], strict=True)
    from_s = [
        (start_s + end_s) / 2 if isinstance(instruction, Forward) else start_s
        for instruction, (start_s, end_s) in spans
    ]
    flights = ((f.edge, f.micro, f.free_s) for f in sent)
    return {(edge, micro): bisect_left(from_s, free_s) for edge, micro, free_s in flights}


def _computes(instruction: Instruction) -> bool:
    return isinstance(instruction, Compute | OptimizerStep)


def _bars(programs: Sequence[Program], stages: Stages, execution: Execution) -> Iterator[Slice]:
    for program in programs:
        spans = execution.spans[program.device]
        for instruction, (start_s, end_s) in zip(program.instructions, spans, strict=True):
            if _computes(instruction):
                yield Slice(program.device, label(instruction), start_s, end_s)
    for flight in execution.flights:
        ends = stages.stages[flight.edge.source].device, stages.stages[flight.edge.target].device
        what = label(Send(flight.edge, flight.micro))
        yield Slice(f"{ends[0]}->{ends[1]}", what, flight.start_s, flight.free_s)


def label(instruction: Instruction) -> str:
    """Return the name of a bar: "forward 0 #3" (stage, micro-batch), "activation x 0->1 #3".

    A BackwardWeight is "weights 0 #3".
    """
    match instruction:
        case Forward(stage, micro) | Backward(stage, micro):
            return f"{instruction.do} {stage} #{micro}"
        case BackwardWeight(stage, micro):
            return f"weights {stage} #{micro}"
        case Send(edge, micro) | Recv(edge, micro):
            return f"{edge}" if micro is None else f"{edge} #{micro}"
        case OptimizerStep():
            return "optimizer step"


# ------------------------------------------------------------------------------------------------
# Asynchronous steps in a row: the same instructions, each step's begun in the one before it.
#
#   stage 0  F0 F1 F2 B0 F3 B1 F4 B2 F5 ...     F3 is of the next batch where a step has three
#   stage 1  .  F0 F1 .  B0 ...
#
# A step by itself, filled and drained, is what Programs say. Here the micro-batches of many steps
# follow each other in one numbering, and the time between two updates is what a step takes.


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


# ------------------------------------------------------------------------------------------------
# A forecast as a Chrome trace, for Perfetto and chrome://tracing.
#
# It knows only the timeline: a bar's name says which computations a message goes between.


Event: TypeAlias = dict[str, object]

DEVICES, LINKS = 1, 2  # process numbers in the trace
_MESSAGE = re.compile(r"(activation|gradient) .* (\d+)->(\d+) (#\d+)", re.DOTALL)
_COMPUTE = {"activation": "forward", "gradient": "backward"}


def chrome_trace(forecast: Forecast) -> list[Event]:
    """Return the timeline as trace events, ready for `json.dump({"traceEvents": events}, file)`.

    Devices are threads of one process and links of another. Bars are "X" events. An arrow ("s",
    "t", "f") leads from the computation that made a message, over its link, to its reader.
    """
    names = {entry.device for entry in forecast.devices}
    rows = list(dict.fromkeys(bar.device for bar in forecast.timeline))
    place = {row: (DEVICES if row in names else LINKS, number) for number, row in enumerate(rows)}
    return [
        *_titles(place),
        *(_bar(bar, place) for bar in forecast.timeline),
        *_arrows(forecast, place),
    ]


def _titles(place: dict[str, tuple[int, int]]) -> Iterator[Event]:
    for pid, name in ((DEVICES, "devices"), (LINKS, "links")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for row, (pid, tid) in place.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}


def _bar(bar: Slice, place: dict[str, tuple[int, int]]) -> Event:
    pid, tid = place[bar.device]
    start_us, end_us = bar.start_s * 1e6, bar.end_s * 1e6
    return {
        "ph": "X",
        "name": bar.what,
        "cat": bar.what.split(" ", 1)[0],
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": end_us - start_us,
    }


def _arrows(forecast: Forecast, place: dict[str, tuple[int, int]]) -> Iterator[Event]:
    computed = {bar.what: bar for bar in forecast.timeline if place[bar.device][0] == DEVICES}
    for number, bar in enumerate(forecast.timeline):
        found = _MESSAGE.fullmatch(bar.what)
        if place[bar.device][0] == DEVICES or found is None:
            continue
        kind, source, target, micro = found.groups()
        made = computed[f"{_COMPUTE[kind]} {source} {micro}"]
        read = computed[f"{_COMPUTE[kind]} {target} {micro}"]
        # an arrow hangs on the bar around its time, and at a bar's end the next one may begin
        inside_s = made.start_s + 0.99 * (made.end_s - made.start_s)
        yield _arrow("s", number, kind, made, inside_s, place)
        yield _arrow("t", number, kind, bar, bar.start_s, place)
        yield {**_arrow("f", number, kind, read, read.start_s, place), "bp": "e"}


def _arrow(
    phase: str, number: int, kind: str, bar: Slice, when_s: float, place: dict[str, tuple[int, int]]
) -> Event:
    pid, tid = place[bar.device]
    return {
        "ph": phase,
        "id": number,
        "name": kind,
        "cat": "message",
        "pid": pid,
        "tid": tid,
        "ts": when_s * 1e6,
    }
