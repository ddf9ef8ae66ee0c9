"""The page of `fidelity`: every row, what all come to, and a plot. It measures nothing.

Only this file knows matplotlib.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.studies.fidelity.cells import is_held_out
from tools.studies.fidelity.report import (
    Summary,
    best_source,
    calibration,
    noise_floor,
    percent,
    summary,
)
from tools.studies.fidelity.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL, GOAL_OF_FLOOR, WORST = 0.05, 1.25, 0.15
HEAD = """# Forecast against measured

Written by `python -m tools.studies.fidelity --out rows.jsonl --write results.md`; do not
edit.

Each cell is a model split over an emulated cluster (own network namespace, processor quota and
link for each device, all on one machine), run as its users run it: medians of {runs} runs of
{steps} steps. Measurements are divided by a matrix product timed in the same seconds; so are
forecasts, simulated for processors as fast as they were then (links are what they are:
`tools/studies/fidelity/drift.py`).
Cells marked c (a model or cluster that may be looked at to mend the forecast) give one factor for
each ground of a forecast; all other figures are of the rest, which had no part in it.

- **devices**: ops profiled on the emulated devices, all at once; links as described
- **steady**: the same, but the time between steps in a row
- **survey**: ops profiled on the bare machine, scaled to the rates and links that `doctor` finds
- **share**: the same ops over each device's share of a core, links as described
- **analytical**: the roofline, on the cluster of `survey`
"""


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Write the page and, beside it, its plot."""
    source, plot = best_source(rows), path.with_suffix(".svg")
    path.write_text("\n".join(_page(rows, source, plot.name)) + "\n")
    _plot(rows, source, plot)


def _page(rows: Sequence[Row], source: str, plot: str) -> Iterator[str]:
    runs = statistics.mode(len(row.step_s) for row in rows)
    steps = statistics.mode(len(row.step_s[0]) for row in rows)
    yield HEAD.format(runs=runs, steps=steps)
    yield from _summaries(rows, source)
    yield f"\n![forecast against measured]({plot})\n"
    yield from _table(rows, source)


def _summaries(rows: Sequence[Row], source: str) -> Iterator[str]:
    found = {name: summary(rows, name) for name in rows[0].forecast_s}
    best = found[source]
    yield (
        f"{best.cells} cells, {best.held_out_cells} held out. The noise floor (one run as the "
        f"forecast of another) is {percent(best.noise_floor)}, so the goal for the mean error is "
        f"{percent(max(GOAL, GOAL_OF_FLOOR * (best.noise_floor or 0)))}, for the worst "
        f"{percent(WORST)}. By the cells marked c, `{source}` is the best ground.\n"
    )
    yield "| ground | factor | mean error | median | worst | as it is | worst | Spearman | regret |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    yield from (_summary_row(name, each) for name, each in found.items())
    yield f"\n{_shares(rows, source)}"
    yield (
        f"\nRanks and regret: means over {best.ranked_pairs} pairs of model and cluster with every "
        f"split and schedule; what differs by less than the floor counts as equal. Strictly, for "
        f"`{source}`: Spearman {_number(best.spearman_strict)}, regret "
        f"{percent(best.regret_strict)}.\n"
    )
    yield (
        f"Peak memory of live tensors, {best.memory_devices} devices: mean error "
        f"{percent(best.memory_mape)}, worst {percent(best.memory_worst)}, lowest "
        f"{percent(best.memory_under)}. Resident memory above what a plan is refused by: "
        f"{best.resident_over_reserved} of {best.resident_devices}."
    )


def _shares(rows: Sequence[Row], source: str) -> str:
    """Say how many cells are how far off."""
    factor, held = _factor(rows, source), [row for row in rows if is_held_out(row.cell)]
    errors = [abs(row.error(source, factor)) for row in held]
    counts = (f"{sum(e <= most for e in errors)} within {most:.0%}" for most in (0.05, 0.1, 0.15))
    return f"By `{source}`, of {len(held)} held-out cells: {', '.join(counts)}."


def _summary_row(name: str, found: Summary) -> str:
    cells = (
        name,
        _number(found.factor),
        percent(found.mape),
        percent(found.median),
        percent(found.worst),
        percent(found.mape_raw),
        percent(found.worst_raw),
        _number(found.spearman),
        percent(found.regret),
    )
    return f"| {' | '.join(cells)} |"


def _table(rows: Sequence[Row], source: str) -> Iterator[str]:
    factor = _factor(rows, source)
    yield f"\nEvery cell, forecast by `{source}` times {factor:.3f}:\n"
    yield "| | cell | measured | repeats | forecast | error | memory |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for row in rows:
        memory = max(row.memory_errors, key=abs, default=None)
        cells = (
            "" if is_held_out(row.cell) else "c",
            str(row.cell),
            f"{row.measured_s:.3f} s",
            percent(noise_floor([row])),
            f"{factor * row.seconds(source):.3f} s",
            f"{100 * row.error(source, factor):+.1f} %",
            "" if memory is None else f"{100 * memory:+.1f} %",
        )
        yield f"| {' | '.join(cells)} |"


def _factor(rows: Sequence[Row], source: str) -> float:
    return calibration([row for row in rows if not is_held_out(row.cell)], source) or 1.0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --------------------------------------------------------------------------- the plot


def _plot(rows: Sequence[Row], source: str, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "bigbrain-fx", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _times(left, rows, source)
        _memory(right, rows)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _times(panel: Axes, rows: Sequence[Row], source: str) -> None:
    factor = _factor(rows, source)
    for held, name, color in ((True, "held out", "C0"), (False, "to calibrate", "C7")):
        some = [row for row in rows if is_held_out(row.cell) == held]
        measured = [1e3 * row.measured for row in some]
        forecast = [1e3 * factor * row.forecast(source) for row in some]
        panel.scatter(measured, forecast, s=8, color=color, label=name, linewidths=0)
    _diagonals(panel, [1e3 * row.measured for row in rows], (1.0, 1 + WORST, 1 / (1 + WORST)))
    panel.set(title=f"step time by {source}", xscale="log", yscale="log")
    panel.set(xlabel="measured, 1000 products", ylabel="forecast, 1000 products")
    panel.legend(frameon=False)


def _memory(panel: Axes, rows: Sequence[Row]) -> None:
    points = [
        (tracked / 2**20, row.forecast_bytes[device] / 2**20)
        for row in rows
        for device, tracked in row.tracked_bytes.items()
    ]
    panel.scatter([a for a, _ in points], [b for _, b in points], s=8, color="C2", linewidths=0)
    _diagonals(panel, [a for a, _ in points], (1.0, 1.05, 0.98))
    panel.set(title="peak of live tensors", xlabel="measured, MiB", ylabel="forecast, MiB")


def _diagonals(panel: Axes, values: Sequence[float], factors: Sequence[float]) -> None:
    if not values:
        return
    ends = [min(values), max(values)]
    for factor in factors:
        style = "-" if factor == 1.0 else ":"
        panel.plot(ends, [factor * end for end in ends], style, color="black", linewidth=0.8)
