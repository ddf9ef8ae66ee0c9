"""Pictures of schedules, drawn by the simulator: who computes what when, and the emitted order.

    python -m tools.gallery            writes the pictures of docs/reference/schedules.md and
                                       docs/explanation/asynchronous.md anew, and the emitted and
                                       written code that docs/explanation/gallery.md shows

Four equal stages on four devices, eight micro-batches; a forward takes one unit, a backward two,
and of a split one gradients of inputs and of weights one each. Messages are free. Each letter is
one unit: F forward, B backward, W backward of weights, with the number of the micro-batch; the
second unit of a whole backward is "==". With two pieces a device a letter is half a unit, and that
of a device's second piece, or of its second replica (gems: four micro-batches), is small. Steps
that overlap (2bw, stash) are drawn three in a row, of four micro-batches each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.core import (
    Asynchronous,
    Cluster,
    Device,
    Edge,
    Forecast,
    Instruction,
    Link,
    OptimizerStep,
    Program,
    Stage,
    Stages,
)
from bigbrain_fx.emit.files.schedule_text import overlapping_lines, step_once_lines
from bigbrain_fx.plan.schedule import ForwardOnly, StageCosts, build, traits
from bigbrain_fx.plan.simulate import in_a_row, simulate, steps_in_a_row
from bigbrain_fx.planning import loop_line, v_line

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs/reference/schedules.md"
OVERLAP = ROOT / "docs/explanation/asynchronous.md"
SHELF = ROOT / "docs/explanation/gallery.md"
STAGES, MICRO_BATCHES = 4, 8
LETTERS = {"forward": "F", "backward": "B", "weights": "W"}
SHOWN = (
    *("forward", "gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v", "gems"),
    *("list", "auto"),
)
OVERLAPPING: tuple[Asynchronous, ...] = ("2bw", "stash")
LINES = {"interleaved": loop_line(STAGES, 2), "zb-v": v_line(STAGES), "dualpipe-v": v_line(STAGES)}
LINES["gems"] = v_line(STAGES)  # there one replica, back the other
LINES["list"] = v_line(STAGES)  # of a chain it makes 1F1B
FEWER = {"gems": 4, "2bw": 4, "stash": 4}
ROW = 3  # steps that overlap, of a picture
_NAMES = "|".join((*SHOWN, *OVERLAPPING))
_BLOCK = re.compile(rf"(<!-- ({_NAMES}) -->\n).*?(<!-- end -->)", re.DOTALL)
_CODE = re.compile(r"(<!-- (\S+\.py) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pipeline(schedule: str) -> tuple[Stages, StageCosts]:
    """Return equal stages, and what they cost in units of a device's forward."""
    line = LINES.get(schedule, tuple(range(STAGES)))
    count, split, copies = len(line), traits(schedule).splits, 2 if traits(schedule).joins else 1
    links = [i for i in range(count - 1) if (i + 1) * copies % count or copies == 1]
    forth = [Edge(f"x{i}", i, i + 1, "activation") for i in links]
    back = [Edge(f"x{i}", i + 1, i, "gradient") for i in links]
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(STAGES))
    deferred = ("weight",) if split else ()
    made = tuple(
        Stage(i, f"d{d}", (), deferred=deferred, replica=i * copies // count)
        for i, d in enumerate(line)
    )
    each = (STAGES / count * copies,) * count
    whole = tuple(2 * unit for unit in each)
    costs = StageCosts(each, whole, (1,) * count, Cluster(devices, Link(0.0, 1e30)))
    costs = replace(costs, backward_s=each, weight_s=each) if split else costs
    micros = tuple(tuple(range(n, micro_batches(schedule), copies)) for n in range(copies))
    return Stages(made, (*forth, *back), micros=micros if copies > 1 else ()), costs


def micro_batches(schedule: str) -> int:
    """Return how many micro-batches a picture has."""
    return FEWER.get(schedule, MICRO_BATCHES)


def picture(schedule: str) -> str:
    """Return a schedule's picture, its step and the emitted order of the second device."""
    if schedule in OVERLAPPING:
        return picture_of_overlap(schedule)
    stages, costs = pipeline(schedule)
    trains = schedule != ForwardOnly.name
    trained = frozenset(range(len(stages.stages) if trains else 0))
    programs = build(schedule, stages, micro_batches(schedule), costs, trained)
    forecast = simulate(programs, stages, costs)
    rows = "\n".join(row(forecast, program.device, costs.forward_s[0]) for program in programs)
    text = "\n".join(line[4:] for line in step_once_lines(programs[1], training=trains))
    work = (3 if trains else 1) * micro_batches(schedule)
    took = f"{forecast.step_s:g} units; {work} are work"
    return f"```\n{rows}\n```\n\n{took}. Device 1 of 4 is written as\n\n```python\n{text}\n```\n"


def picture_of_overlap(mode: Asynchronous) -> str:
    """Return some steps in a row, the first of which begins empty, and the emitted order."""
    stages, costs = pipeline("1f1b")
    stages, count = replace(stages, asynchronous=mode), micro_batches(mode)
    trained = frozenset(range(len(stages.stages)))
    programs = build("1f1b", stages, count, costs, trained)
    alone = simulate(programs, stages, costs)
    forecast = simulate(_first(steps_in_a_row(programs, stages), ROW * count), stages, costs)
    rows = "\n".join(row(forecast, p.device, costs.forward_s[0], count) for p in programs)
    text = "\n".join(line[4:] for line in overlapping_lines(programs[1], stages, count))
    step_s = in_a_row(programs, stages, costs, alone).step_s
    took = f"{step_s:g} units a step in a row, {alone.step_s:g} alone; {3 * count} are work"
    return f"```\n{rows}\n```\n\n{took}. Device 1 of 4 is written as\n\n```python\n{text}\n```\n"


def _first(programs: Sequence[Program], count: int) -> tuple[Program, ...]:
    """Return what is done of so many micro-batches; updates take no time here."""

    def is_shown(each: Instruction) -> bool:
        return not isinstance(each, OptimizerStep) and (each.micro or 0) < count

    return tuple(
        replace(p, instructions=tuple(i for i in p.instructions if is_shown(i))) for p in programs
    )


def row(forecast: Forecast, device: str, unit_s: float, count: int = MICRO_BATCHES) -> str:
    """Return one device's line, two letters a unit; each batch has so many micro-batches."""
    cells = [" ."] * round(forecast.step_s / unit_s)
    for bar in forecast.timeline:
        kind, stage = bar.what.split()[:2]
        letter = LETTERS.get(kind)
        if bar.device != device or letter is None:
            continue
        letter = letter.lower() if int(stage) >= STAGES else letter
        start, end = round(bar.start_s / unit_s), round(bar.end_s / unit_s)
        number = int(bar.what.rpartition("#")[2]) % count
        cells[start:end] = [f"{letter}{number}", *["=="] * (end - start - 1)]
    return f"{device} {' '.join(cells)}"


def with_pictures(text: str) -> str:
    """Return the page with all its pictures drawn anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{picture(found[2])}{found[3]}", text)


def code(file: str, name: str) -> str:
    """Return the text of a class or function of a file of the repository."""
    text = (ROOT / file).read_text()
    nodes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    node = next(node for node in nodes if node.name == name)
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(["```python", *lines, "```", ""])


def with_code(text: str) -> str:
    """Return the page with the code that it shows as it is today."""
    return _CODE.sub(lambda found: f"{found[1]}{code(found[2], found[3])}{found[4]}", text)


if __name__ == "__main__":
    SHELF.write_text(with_code(SHELF.read_text()))
    for page in (DOC, OVERLAP):
        page.write_text(with_pictures(page.read_text()))
