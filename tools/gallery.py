"""Pictures of schedules, drawn by the simulator: who computes what when, and the emitted order.

    python -m tools.gallery            writes the pictures of docs/schedules.md anew

Four equal stages on four devices, eight micro-batches; a forward takes one unit, a backward two,
and of a split one gradients of inputs and of weights one each. Messages are free. Each letter is
one unit: F forward, B backward, W backward of weights, with the number of the micro-batch; the
second unit of a whole backward is "==".
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.core import Cluster, Device, Edge, Forecast, Link, Stage, Stages
from bigbrain_fx.emit.files.device import step_once_lines
from bigbrain_fx.plan.schedule import SPLIT, StageCosts, build
from bigbrain_fx.plan.simulate import simulate

DOC = Path(__file__).resolve().parent.parent / "docs" / "schedules.md"
STAGES, MICRO_BATCHES = 4, 8
LETTERS = {"forward": "F", "backward": "B", "weights": "W"}
SHOWN = ("gpipe", "1f1b", "zb-h1")
_BLOCK = re.compile(r"(<!-- (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pipeline(split: bool) -> tuple[Stages, StageCosts]:
    """Return equal stages on a device each, and what they cost in units."""
    forth = [Edge(f"x{i}", i, i + 1, "activation") for i in range(STAGES - 1)]
    back = [Edge(f"x{i}", i + 1, i, "gradient") for i in range(STAGES - 1)]
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(STAGES))
    deferred = ("weight",) if split else ()
    made = tuple(Stage(i, f"d{i}", (), deferred=deferred) for i in range(STAGES))
    units = (1.0,) * STAGES
    costs = StageCosts(units, (2.0,) * STAGES, (1,) * STAGES, Cluster(devices, Link(0.0, 1e30)))
    costs = replace(costs, backward_s=units, weight_s=units) if split else costs
    return Stages(made, (*forth, *back)), costs


def picture(schedule: str) -> str:
    """Return a schedule's picture, its step and the emitted order of the second device."""
    stages, costs = pipeline(schedule in SPLIT)
    trained = frozenset(range(STAGES))
    programs = build(schedule, stages, MICRO_BATCHES, costs, trained)
    forecast = simulate(programs, stages, costs)
    rows = "\n".join(row(forecast, program.device) for program in programs)
    text = "\n".join(line[4:] for line in step_once_lines(programs[1], training=True))
    took = f"{forecast.step_s:.0f} units; {3 * MICRO_BATCHES} are work"
    return f"```\n{rows}\n```\n\n{took}. Device 1 of 4 is written as\n\n```python\n{text}\n```\n"


def row(forecast: Forecast, device: str) -> str:
    """Return one device's line, two letters a unit."""
    cells = [" ."] * round(forecast.step_s)
    for bar in forecast.timeline:
        kind = LETTERS.get(bar.what.split()[0])
        if bar.device != device or kind is None:
            continue
        start, end = round(bar.start_s), round(bar.end_s)
        cells[start:end] = [f"{kind}{bar.what.rpartition('#')[2]}", *["=="] * (end - start - 1)]
    return f"{device} {' '.join(cells)}"


def with_pictures(text: str) -> str:
    """Return the page with all its pictures drawn anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{picture(found[2])}{found[3]}", text)


if __name__ == "__main__":
    DOC.write_text(with_pictures(DOC.read_text()))
