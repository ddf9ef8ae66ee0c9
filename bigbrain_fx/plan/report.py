"""Plan -> one self-contained HTML page: the step as a picture, devices, memory, cuts, the search.

No script, no font and no image from elsewhere: the page opens from a file. This room knows plans
and forecasts; it draws what they say and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bigbrain_fx.core import DeviceForecast, Forecast, Slice, micro_text
from bigbrain_fx.plan.explain import Cut, Explanation, explain, size_text
from bigbrain_fx.plan.making import timeline
from bigbrain_fx.plan.measured import COMPUTES, MeasuredStep
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.picture import ROW, WIDTH, Curve, curves, gantt, key, rect, svg, text
from bigbrain_fx.plan.search import Candidate, Search

MOST_ROWS = 24  # of a table or a drawing; plan.json and `explain` have all
MOST_CUTS = 8
PARTS = (
    ("weights", "weights_bytes", "#4c78a8"),
    ("gradients", "gradients_bytes", "#f58518"),
    ("optimizer", "optimizer_bytes", "#54a24b"),
    ("activations", "activations_bytes", "#e45756"),
    ("messages", "messages_bytes", "#72b7b2"),
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; color: #222;
  max-width: 1040px; }
.wide { overflow-x: auto; } svg { display: block; width: 100%; min-width: 640px; }
table { border-collapse: collapse; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; } svg text { font: 12px system-ui, sans-serif; }
.key span { margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8em; height: .8em; }
"""


def report(
    plan: Plan, measured: MeasuredStep | None = None, forecast: Forecast | None = None
) -> str:
    """Return the page; the same plan, and the same measured step, give the same text.

    `forecast` is the plan's, with its timeline; made here where it is left out.
    """
    found, forecast = explain(plan), forecast or timeline(plan)
    rows = plan.micro_batches * plan.rows
    head = (
        f"{len(plan.stages.stages)} stages on {len(plan.stages.devices)} devices, {plan.schedule}, "
        f"{micro_text(plan.micro_batches)} of {plan.rows} rows; forecast {forecast.step_s:.4f} s "
        f"a step, {rows / forecast.step_s:.1f} rows a second"
    )
    head = "; ".join([head, *plan.said.values(), *filter(None, [found.tensor])])
    title = escape(plan.graph.name)
    return "\n".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style>",
            f"<h1>{title}</h1><p>{escape(head)}</p>",
            "<h2>One step, by forecast</h2>",
            gantt(forecast.timeline, plan.stages.devices, forecast.step_s),
            *(_measured(plan, measured, forecast) if measured else ()),
            "<h2>Devices</h2>",
            _devices(plan, found),
            *(("<h2>Links</h2>", _links(plan, forecast)) if len(plan.stages.devices) > 1 else ()),
            "<h2>Memory over a step</h2>",
            _over_time(plan, measured, forecast),
            "<h2>Memory at the peak</h2>",
            _memory(plan, forecast),
            *(("<h2>Cuts</h2>", _cuts(found)) if found.cuts else ()),
            *(("<h2>What auto compared</h2>", _compared(plan.search)) if plan.search else ()),
            "</html>\n",
        )
    )


def _measured(plan: Plan, step: MeasuredStep, forecast: Forecast) -> tuple[str, ...]:
    """Draw a step that was run, and set it beside the forecast device by device."""
    bars = [bar for bar in step.bars if bar.what.split(" ", 1)[0] in COMPUTES]
    off = forecast.step_s / step.step_s - 1
    said = (
        f"Step {step.step}, of median length, took {1e3 * step.step_s:.2f} ms; the forecast for "
        f"the devices of the cluster file is {1e3 * forecast.step_s:.2f} ms ({off:+.1%}). Between "
        "bars a device waits, or sends."
    )
    if any(plan.cluster.device[name].kind == "cuda" for name in plan.stages.devices):
        said += " Bars of a GPU are those of the process that starts its work."
    rows = [_beside(entry, step) for entry in forecast.devices]
    head = (
        "device",
        "computes, measured",
        "computes, forecast",
        "holds after an instruction",
        "at its peak, forecast",
    )
    return (
        "<h2>The same step, measured</h2>",
        f"<p>{escape(said)}</p>",
        gantt(bars, plan.stages.devices, step.step_s),
        _table(head, rows, MOST_ROWS),
    )


def _beside(entry: DeviceForecast, step: MeasuredStep) -> tuple[str, ...]:
    held = step.peak_bytes.get(entry.device)
    busy_s = step.busy_s(entry.device)
    times = f"{1e3 * busy_s:.2f} ms", f"{1e3 * entry.busy_s:.2f} ms"
    sizes = "not measured" if held is None else size_text(held), size_text(entry.peak_bytes)
    return (entry.device, *times, *sizes)


def _devices(plan: Plan, found: Explanation) -> str:
    rows = []
    for part in found.devices:
        device = plan.cluster.device[part.device]
        speed = _speed(device.flops_per_s, "FLOP/s"), _speed(device.memory_bytes_per_s, "B/s")
        times = f"{1e3 * part.busy_s:.1f} ms", f"{1e3 * part.idle_s:.1f} ms"
        stages = ", ".join(map(str, part.stages))
        peak = f"{size_text(part.peak_bytes)} of {size_text(part.memory_bytes)}"
        rows.append((part.device, *speed, stages, part.modules, str(part.ops), *times, peak))
    rates = "computes", "reads memory"
    head = ("device", *rates, "stages", "modules", "ops", "busy", "idle", "memory at the peak")
    return _table(head, rows, MOST_ROWS)


def _links(plan: Plan, forecast: Forecast) -> str:
    """Return how busy each link is, the busiest first."""
    bars: dict[str, list[Slice]] = {}
    for bar in forecast.timeline:
        if bar.device not in plan.stages.devices:
            bars.setdefault(bar.device, []).append(bar)
    busy_s = {link: _taken_s(own) for link, own in bars.items()}
    rows = [
        (link, str(len(bars[link])), f"{1e3 * busy_s[link]:.2f} ms", _share(link, busy_s, forecast))
        for link in sorted(bars, key=lambda link: -busy_s[link])
    ]
    head = ("link", "messages a step", "busy", "of the step")
    note = "<p>Exchanges inside of tensor groups count as computation.</p>"
    return _table(head, rows, MOST_ROWS) + (note if plan.stages.members > 1 else "")


def _share(link: str, busy_s: Mapping[str, float], forecast: Forecast) -> str:
    return f"{busy_s[link] / (forecast.step_s or 1.0):.1%}"


def _taken_s(bars: Sequence[Slice]) -> float:
    """Return how long any of these lasts; messages may share a link."""
    total_s = end_s = 0.0
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        total_s += max(0.0, bar.end_s - max(bar.start_s, end_s))
        end_s = max(end_s, bar.end_s)
    return total_s


def _over_time(plan: Plan, measured: MeasuredStep | None, forecast: Forecast) -> str:
    """Draw what devices hold; a measured step is drawn as long as the forecast one."""
    stretch = forecast.step_s / measured.step_s if measured else 1.0
    held = measured.held if measured else {}
    rows = [
        Curve(
            entry.device,
            plan.cluster.device[entry.device].memory_bytes,
            _said_of(entry, plan.cluster.device[entry.device].memory_bytes),
            entry.held,
            [(when_s * stretch, nbytes) for when_s, nbytes in held.get(entry.device, ())],
        )
        for entry in forecast.devices[:MOST_ROWS]
    ]
    return curves(rows, forecast.step_s) + _left_out(len(forecast.devices), MOST_ROWS)


def _said_of(entry: DeviceForecast, has: int) -> str:
    return f"{size_text(entry.peak_bytes)}, {entry.peak_bytes / has:.1%} of {size_text(has)}"


def _speed(per_s: float, unit: str) -> str:
    prefix, size = ("T", 1e12) if per_s >= 1e12 else ("G", 1e9)
    return f"{per_s / size:.3g} {prefix}{unit}"


def _cuts(found: Explanation) -> str:
    """Return the cuts that take longest, each with the nearest of its alternatives."""
    slowest = sorted(found.cuts, key=lambda cut: -cut.transfer_s - cut.back_transfer_s)
    kept = sorted(slowest[:MOST_CUTS], key=lambda cut: (cut.source, cut.target))
    rows = [
        (
            f"{cut.source} → {cut.target}",
            cut.after,
            f"{size_text(cut.nbytes)} in {1e3 * cut.transfer_s:.2f} ms",
            _nearest(found, cut),
        )
        for cut in kept
    ]
    head = ("stages", "after", "a micro-batch", "the nearest other place")
    more = len(found.cuts) - len(kept)
    note = f"<p>Those that take longest; {more} others: bigbrain-fx explain.</p>" if more else ""
    return _table(head, rows, MOST_CUTS) + note


def _nearest(found: Explanation, cut: Cut) -> str:
    possible = sorted(cut.alternatives, key=lambda each: each.step_s or float("inf"))
    return found.compare(possible[0]) if possible else ""


def _compared(search: Search) -> str:
    """Return the plans that `auto` looked at closest, beside the one it took."""
    best_s = search.winner.step_s or 0.0
    tried = [search.winner, *search.others, *search.refused]
    rows = [(_candidate(each), *_fared(each, best_s), each.why) for each in tried]
    note = f"{search.looked_at} splits compared, {search.simulated} simulated. {search}"
    head = ("plan", "a step", "slower by", "why not")
    return _table(head, rows, MOST_ROWS) + f"<p>{escape(note)}</p>"


def _candidate(each: Candidate) -> str:
    again = "; recompute" if each.recompute else ""
    order = ", ".join(each.devices[:6]) + (", ..." if len(each.devices) > 6 else "")
    return f"{each.partitioner}, {each.schedule}, {micro_text(each.micro_batches)}{again}: {order}"


def _fared(each: Candidate, best_s: float) -> tuple[str, str]:
    if each.step_s is None:
        return "does not fit", ""
    slower = each.step_s / best_s - 1 if best_s else 0.0
    return f"{each.step_s:.4f} s", f"{slower:.1%}" if slower else "taken"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[:most]]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>{body}</table></div>' + _left_out(len(rows), most)


def _left_out(count: int, most: int) -> str:
    return f"<p>The first {most} of {count}; plan.json has all.</p>" if count > most else ""


def _memory(plan: Plan, forecast: Forecast) -> str:
    """Draw a bar per device, of what its peak is made of, with what it has beside it."""
    shown = forecast.devices[:MOST_ROWS]
    parts = [(name, field, colour) for name, field, colour in PARTS if _is_shown(plan, name)]
    label = 12 + 7.0 * max(len(entry.device) for entry in shown)
    largest = max(entry.peak_bytes for entry in shown)
    scale = (WIDTH - label - 230) / (largest or 1)
    shapes: list[str] = []
    for row, entry in enumerate(shown):
        y, x = row * ROW, label
        shapes.append(text(0, y, entry.device))
        for name, field, colour in parts:
            nbytes = int(getattr(entry, field))
            shapes.append(rect(x, y, nbytes * scale, colour, f"{name} {size_text(nbytes)}"))
            x += nbytes * scale
        has = plan.cluster.device[entry.device].memory_bytes
        shapes.append(text(x + 8, y, _said_of(entry, has)))
    colours = {name: colour for name, _, colour in parts}
    rest = _left_out(len(forecast.devices), MOST_ROWS)
    return key(colours) + svg(shapes, len(shown) * ROW) + rest


def _is_shown(plan: Plan, name: str) -> bool:
    return plan.mode == "train" or name not in ("gradients", "optimizer")
