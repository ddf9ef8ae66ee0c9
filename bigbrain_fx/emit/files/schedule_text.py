"""A device's schedule as code, `step_once`: instructions that repeat per micro-batch are a loop.

F0 F1 B0 F2 B1 F3 B2 B3     becomes     for m in 0, 1: F(m)     warm-up
                                        for m in 0, 1: B(m), F(m+2)
                                        for m in 2, 3: B(m)

Interleaved orders repeat every few micro-batches: `for m in range(0, 30, 2)`. An order without a
period is a table and a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.core import BackwardWeight, Compute, Program, Stages
from bigbrain_fx.emit.files.channels import DeviceFile


def schedule_lines(file: DeviceFile) -> list[str]:
    """Write the order in which a device runs its methods in one step."""
    if file.stages.asynchronous:
        return overlapping_lines(file.program, file.stages, file.micro_batches)
    return step_once_lines(file.program, file.graph.loss is not None, _own_micros(file))


def step_once_lines(program: Program, training: bool, micros: Sequence[int] = ()) -> list[str]:
    """Write a schedule; of a replica by places among its own micro-batches."""
    places = {micro: place for place, micro in enumerate(micros)}
    steps = [
        MicroAction(f"{_verb(i)}_{i.stage}", places.get(i.micro, i.micro))
        for i in program.instructions
        if isinstance(i, Compute)
    ]
    loops = roll(steps)
    lines = ["    def step_once(self) -> None:"]
    lines += ["        own = self.micros[self.replica]  # its micro-batches"] if places else []
    if is_readable(loops):
        lines += [line for loop in loops for line in _loop(loop, bool(places))]
    else:
        lines = [
            *_table(steps),
            "",
            *lines,
            f"        for action, {'i' if places else 'm'} in self.order:",
            f"            getattr(self, action)({'own[i]' if places else 'm'})",
        ]
    return [*lines, "        self.update()"] if training else lines


def overlapping_lines(program: Program, stages: Stages, count: int) -> list[str]:
    """Write 1F1B whose last backwards stand beside the next batch's first forwards."""
    number = stages.of(program.device)[0].index
    ahead = stages.ahead(number)
    forward = f"self.forward_{number}(m{f' + {ahead}' if ahead else ''})"
    updates = ["self.update()"] if stages.asynchronous == "stash" else []
    rest = [f"self.backward_{number}(m)", *updates]
    lines = ["def step_once(self) -> None:"]
    if ahead:
        lines += ["    if self.begins_empty:", f"        for m in range({ahead}):"]
        lines += [f"            self.forward_{number}(m)"]
    lines += [f"    for m in range({count - ahead}):"]
    lines += [f"        {each}" for each in (forward, *rest)]
    if ahead:
        lines += [f"    for m in range({count - ahead}, {count}):"]
        lines += [f"        if self.goes_on:  # {count} is the next batch's first"]
        lines += [f"            {forward}", *(f"        {each}" for each in rest)]
    lines += [] if updates else ["    self.update()"]
    return [f"    {line}" for line in lines]


def _verb(compute: Compute) -> str:
    return "weights" if isinstance(compute, BackwardWeight) else compute.do


def _own_micros(file: DeviceFile) -> tuple[int, ...]:
    """Return the micro-batches of a device's one replica; nothing, where it counts all."""
    if len(file.stages.replicas_on(file.program.device)) > 1:
        return ()
    stage = file.stages.of(file.program.device)[0]
    return file.stages.micros_of(stage.index, 0)


def _loop(loop: MicroLoop, of_replica: bool) -> list[str]:
    name = "i" if of_replica else "m"

    def call(action: str, micro: str) -> str:
        return f"self.{action}({f'own[{micro}]' if of_replica else micro})"

    if loop.count == 1:
        return [f"        {call(step.action, str(step.micro))}" for step in loop.body]
    least = min(step.micro for step in loop.body)
    bounds = f"{least}, {least + loop.count}" if least else f"{loop.count}"
    if loop.stride > 1:  # the end is where the next turn would begin
        bounds = f"{least}, {least + loop.count * loop.stride}, {loop.stride}"
    lines = [f"        for {name} in range({bounds}):"]
    for step in loop.body:
        shift = step.micro - least
        lines.append(f"            {call(step.action, f'{name} + {shift}' if shift else name)}")
    return lines


def _table(steps: Sequence[MicroAction]) -> list[str]:
    """Write a schedule that has no period as rows of (action, micro-batch)."""
    cells = [f"({step.action!r}, {step.micro})" for step in steps]
    rows = [", ".join(cells[i : i + 4]) for i in range(0, len(cells), 4)]
    return ["    order = (", *(f"        {row}," for row in rows), "    )"]


MAX_BODY = 64
MAX_STRIDE = 16
MAX_STATEMENTS = 28  # more than that is no loop a person would read: write a table


@dataclass(frozen=True)
class MicroAction:
    """One action on one micro-batch."""

    action: str
    micro: int


@dataclass(frozen=True)
class MicroLoop:
    """`body` repeated `count` times; in turn i every micro-batch number is higher by i strides."""

    body: tuple[MicroAction, ...]
    count: int
    stride: int = 1


def roll(steps: Sequence[MicroAction]) -> list[MicroLoop]:
    """Write steps as loops, from left to right, each time the loop that saves most.

    `unroll(roll(steps)) == steps` always; a loop of count 1 is a plain statement.
    """
    loops: list[MicroLoop] = []
    start = 0
    while start < len(steps):
        length, count, stride = _best(steps, start)
        loops.append(MicroLoop(tuple(steps[start : start + length]), count, stride))
        start += length * count
    return loops


def unroll(loops: Sequence[MicroLoop]) -> list[MicroAction]:
    """Return the steps that loops stand for."""
    return [
        MicroAction(step.action, step.micro + turn * loop.stride)
        for loop in loops
        for turn in range(loop.count)
        for step in loop.body
    ]


def is_readable(loops: Sequence[MicroLoop]) -> bool:
    """Whether the loops are short enough to be written as text."""
    return sum(len(loop.body) for loop in loops) <= MAX_STATEMENTS


def _best(steps: Sequence[MicroAction], start: int) -> tuple[int, int, int]:
    """Return length, count and stride of the loop from `start` that saves most, else (1, 1, 1)."""
    best = (1, 1, 1)
    for length in range(1, min(MAX_BODY, (len(steps) - start) // 2) + 1):
        stride = steps[start + length].micro - steps[start].micro
        if not 1 <= stride <= MAX_STRIDE:
            continue
        count = _turns(steps, start, length, stride)
        if count > 1 and length * (count - 1) > best[0] * (best[1] - 1):
            best = (length, count, stride)
    return best


def _turns(steps: Sequence[MicroAction], start: int, length: int, stride: int) -> int:
    """Return how often what begins at `start` comes, in whole turns."""
    end = start + length
    while end < len(steps) and _follows(steps[end - length], steps[end], stride):
        end += 1
    return (end - start) // length


def _follows(before: MicroAction, step: MicroAction, stride: int) -> bool:
    return step.action == before.action and step.micro == before.micro + stride
