"""Nouns on a terminal, and the same words in a pipe: tables there without boxes, nothing coloured.

Knows no commands and decides nothing. Names come from the user's files: they are never markup.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbrain_fx.explain import Explanation, explain, measured_text, size_text
from bigbrain_fx.plan import Plan, measured_share

if TYPE_CHECKING:
    from bigbrain_fx.compile import Split
    from bigbrain_fx.verify import Verification

MOST_CUTS = 12  # scattered placements have hundreds; --json has them all
WIDE = 10_000  # neither a pipe's edge nor a narrow terminal's cuts a figure in two


def show_plan(plan: Plan, parameters: int) -> None:
    """Print what was decided, and why each cut is where it is; `explain` has recovery too."""
    stages, devices = len(plan.stages.stages), len(plan.stages.devices)
    _say(
        (plan.graph.name, "bold"),
        f": {_count(parameters, 'parameter')}, {_count(len(plan.graph.ops), 'op')}; "
        f"{_count(stages, 'stage')} on {_count(devices, 'device')}; {_schedule(plan)}",
    )
    show_explanation(dataclasses.replace(explain(plan), recovery=None))


def show_forecast(plan: Plan) -> None:
    """Print what a step would take, and that it fits."""
    rows_per_s = plan.micro_batches * plan.rows / plan.forecast.step_s
    by = f"{plan.partitioner} with {plan.estimator}"
    _say((plan.graph.name, "bold"), f": {by}, {_schedule(plan)}")
    measured = measured_text(measured_share(plan))
    said = f"forecast {plan.forecast.step_s:.4f} s a step, {rows_per_s:.1f} rows a second{measured}"
    _say(f"{said}; it fits:")
    heads = ("device", "busy s", "idle s", "weights", "gradients", "optimizer", "activations")
    rows = []
    for entry in plan.forecast.devices:
        sizes = (
            entry.weights_bytes,
            entry.gradients_bytes,
            entry.optimizer_bytes,
            entry.activations_bytes,
            entry.messages_bytes,
            entry.peak_bytes,
            plan.cluster.device[entry.device].memory_bytes,
        )
        times = f"{entry.busy_s:.4f}", f"{entry.idle_s:.4f}"
        rows.append((entry.device, *times, *map(size_text, sizes)))
    _table((*heads, "messages", "peak", "has"), rows)


def show_explanation(found: Explanation) -> None:
    """Print the parts and the cuts of a plan."""
    rows = [
        (
            part.device,
            ", ".join(map(str, part.stages)),
            part.modules,
            str(part.ops),
            f"{part.busy_s:.4f}",
            f"{part.idle_s:.4f}",
            size_text(part.peak_bytes),
            size_text(part.memory_bytes),
        )
        for part in found.devices
    ]
    _table(("device", "stages", "modules", "ops", "busy s", "idle s", "memory", "of"), rows)
    if found.reason:
        _say(found.reason)
    largest = sorted(found.cuts, key=lambda cut: -cut.nbytes)[:MOST_CUTS]
    for cut in found.cuts:
        if cut in largest:
            _say(found.cut_text(cut))
            for line in map(found.compare, cut.alternatives):
                _say(f"  {line}")
    if len(found.cuts) > MOST_CUTS:
        _say(f"and {len(found.cuts) - MOST_CUTS} smaller cuts, see --json")
    if found.moved:
        _say(f"{_count(len(found.moved), 'op')} moved to stay with others: {_few(found.moved)}")
    if found.recovery:
        _say(f"when a device dies: {found.recovery}")
    _say(f"forecast {found.step_s:.4f} s a step{measured_text(found.measured)}")


def show_verification(found: Verification) -> None:
    """Print each equality, and where it fails."""
    for check in found.checks:
        mark = ("equal", "green") if check.passed else ("DIFFERENT", "red")
        _say(mark, f"  {check.name}: {check.detail}")


# --------------------------------------------------------------------------- as JSON


def json_line(value: object) -> str:
    """Write a value as one line of JSON; numbers that JSON has no word for become null."""
    return json.dumps(_plain(value), allow_nan=False)


def split_json(made: Split) -> dict[str, object]:
    """Return what `split --json` prints."""
    head = {"bundle": str(made.bundle), "parameters": made.parameters}
    return {**head, "warnings": made.warnings, **plan_json(made.plan)}


def plan_json(plan: Plan) -> dict[str, object]:
    """Return what `estimate --json` and `simulate --json` print of a plan."""
    return {
        "model": plan.graph.name,
        "plan": plan.key,
        "partitioner": plan.partitioner,
        "estimator": plan.estimator,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "rows": plan.rows,
        "stages": len(plan.stages.stages),
        "step_s": plan.forecast.step_s,
        "measured": measured_share(plan),
        "devices": [
            {
                **dataclasses.asdict(entry),
                "memory_bytes": plan.cluster.device[entry.device].memory_bytes,
            }
            for entry in plan.forecast.devices
        ],
    }


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


# --------------------------------------------------------------------------- words


def _say(*parts: str | tuple[str, str]) -> None:
    _console().print(Text.assemble(*parts), soft_wrap=True)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console = _console()
    table = Table(*heads, box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _console() -> Console:
    return Console(highlight=False, width=WIDE)


def _schedule(plan: Plan) -> str:
    count = _count(plan.micro_batches, "micro-batch", "micro-batches")
    return f"{plan.schedule}, {count} of {_count(plan.rows, 'row')}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
