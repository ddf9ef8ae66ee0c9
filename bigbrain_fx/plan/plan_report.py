"""Plan -> one self-contained HTML page: the step as a picture, devices, memory, cuts, the search.

No script, no font and no image from elsewhere: the page opens from a file. This module knows plans
and forecasts; it draws what they say and measures nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bigbrain_fx.core import DeviceForecast, Forecast, Slice, micro_text
from bigbrain_fx.plan.explanation import Cut, Explanation, explain, size_text
from bigbrain_fx.plan.making import timeline
from bigbrain_fx.plan.measured import COMPUTES, MeasuredStep
from bigbrain_fx.plan.nouns import Plan
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


# ------------------------------------------------------------------------------------------------
# A step as drawings: who computes what when, and what each device holds, over one time axis.
#
# Plain SVG that scales with its page; it goes by timelines alone.


WIDTH = 1000  # of the drawing, in its own units
ROW = 26
AXIS = 24
MOST_BARS = 2500  # a page of more opens slowly; timeline.json has them all
NARROW = 14.0  # bars below it have no room for a number
TALL = 64  # of a row with a curve
FILLED, LINE, LIMIT = "#c3d3e8", "#e45756", "#222"
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weights": "#eeca3b",
    "optimizer": "#54a24b",
    "messages": "#b0b7bf",
}


def gantt(timeline: Sequence[Slice], devices: Sequence[str], step_s: float) -> str:
    """Draw who computes what when, and beneath it what travels on which link."""
    links = [bar.device for bar in timeline if bar.device not in devices]
    lanes = _first(timeline, [*devices, *dict.fromkeys(links)])
    label = 12 + 7.0 * max(map(len, lanes), default=0)
    scale = (WIDTH - label - 30) / (step_s or 1.0)
    height = len(lanes) * ROW
    shapes = [_tick(at, unit, label + at * scale, height) for at, unit in ticks(step_s)]
    shapes += [text(0, row * ROW, lane) for row, lane in enumerate(lanes)]
    rows = {lane: row * ROW for row, lane in enumerate(lanes)}
    bars = [bar for bar in timeline if bar.device in rows]
    for bar in bars:
        shapes += _slice(bar, label, rows[bar.device], scale)
    shown = {name: colour for name, colour in COLOURS.items() if name in set(map(_kind, bars))}
    rest = _lanes_left_out(len(devices) + len(set(links)), lanes)
    return key(shown) + svg(shapes, height + AXIS) + rest


@dataclass(frozen=True)
class Curve:
    """One device's memory over a step.

    Attributes:
        device: whose memory it is.
        limit: bytes that the device has.
        said: stands at the end of its row.
        filled: by forecast: seconds, and the bytes held from then on.
        line: likewise as measured; empty where it was not.
    """

    device: str
    limit: int
    said: str
    filled: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]] = ()


def curves(rows: Sequence[Curve], step_s: float) -> str:
    """Draw what devices hold over a step against what they have.

    A row is as high as the device's memory, or, where less than a quarter of it is used, as the
    most that is held.
    """
    label, said = 12 + 7.0 * max(len(row.device) for row in rows), 190
    scale, height = (WIDTH - label - said) / (step_s or 1.0), len(rows) * TALL
    shapes = [_tick(at, unit, label + at * scale, height) for at, unit in ticks(step_s)]
    for number, row in enumerate(rows):
        shapes += _curve(row, number * TALL, label, WIDTH - said, step_s)
    shown = {"forecast": FILLED, **({"measured": LINE} if any(row.line for row in rows) else {})}
    return key(shown) + svg(shapes, height + AXIS)


def _curve(row: Curve, y: float, left: float, right: float, step_s: float) -> list[str]:
    peak = max((held for _, held in (*row.filled, *row.line)), default=0)
    top = row.limit if peak > row.limit / 4 else peak
    scale = (TALL - 14) / (max(top, peak) or 1)
    floor = y + TALL - 4

    def path(held: Sequence[tuple[float, float]]) -> str:
        points = _columns(held, step_s, int(right - left))
        return " ".join(f"{left + x:.0f},{floor - high * scale:.1f}" for x, high in points)

    area = f"{left:.0f},{floor:.0f} {path(row.filled)} {right:.0f},{floor:.0f}"
    shapes = [f'<polygon points="{area}" fill="{FILLED}"/>'] if row.filled else []
    if row.line:
        shapes.append(f'<polyline points="{path(row.line)}" fill="none" stroke="{LINE}"/>')
    if top == row.limit:
        at = f'x1="{left:.0f}" x2="{right:.0f}" y1="{floor - top * scale:.1f}"'
        dashed = f'y2="{floor - top * scale:.1f}" stroke="{LIMIT}" stroke-dasharray="5 3"'
        shapes.append(f"<line {at} {dashed}><title>memory of {escape(row.device)}</title></line>")
    middle = y + (TALL - ROW) / 2
    return [*shapes, text(0, middle, row.device), text(right + 8, middle, row.said)]


def _columns(
    held: Sequence[tuple[float, float]], step_s: float, count: int
) -> list[tuple[int, float]]:
    """Return the corners of a curve of so many columns, each as high as the most in it."""
    tops = [0.0] * (count + 1)
    starts = [0.0, *(start_s for start_s, _ in held[1:])]  # as before the first note
    for (_, nbytes), start_s, end_s in zip(held, starts, [*starts[1:], step_s], strict=True):
        first, last = (min(count, int(at / (step_s or 1.0) * count)) for at in (start_s, end_s))
        for column in range(first, last + 1):
            tops[column] = max(tops[column], nbytes)
    turns = [i for i, top in enumerate(tops) if not i or top != tops[i - 1]]
    corners = [(i, tops[at]) for i in turns for at in ((i, i) if not i else (i - 1, i))]
    return [*corners, (count, tops[-1])]


def ticks(step_s: float) -> list[tuple[float, str]]:
    """Return some round times of a step, each with its text."""
    if step_s <= 0:
        return []
    magnitude = 10.0 ** math.floor(math.log10(step_s / 5))
    apart = next(magnitude * n for n in (1, 2, 5, 10) if step_s / (magnitude * n) <= 8)
    unit, factor = ("s", 1.0) if step_s >= 1 else ("ms", 1e3)
    return [(i * apart, f"{i * apart * factor:.6g} {unit}") for i in range(int(step_s / apart) + 1)]


def key(colours: dict[str, str]) -> str:
    """Return what the colours mean."""
    said = (f'<span><i style="background:{c}"></i> {n}</span>' for n, c in colours.items())
    return f'<p class="key">{"".join(said)}</p>'


def rect(x: float, y: float, width: float, colour: str, label: str) -> str:
    """Return a bar; `label` is shown when it is pointed at."""
    place = f'x="{x:.1f}" y="{y:.0f}" width="{max(width, 0.2):.1f}" height="{ROW - 6}"'
    return f'<rect {place} fill="{colour}"><title>{escape(label)}</title></rect>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return words in a row that begins at `y`."""
    return f'<text x="{x:.1f}" y="{y + ROW - 12:.0f}"{more}>{escape(words)}</text>'


def svg(shapes: Sequence[str], height: int) -> str:
    """Return a drawing that is as wide as its page, and can be moved in a narrow one."""
    box = f'viewBox="0 0 {WIDTH} {height}" role="img"'
    return f'<div class="wide"><svg {box}>' + "\n".join(shapes) + "</svg></div>"


def _first(timeline: Sequence[Slice], lanes: Sequence[str]) -> list[str]:
    """Return the lanes that are drawn: all, or the first ones that have not too many bars."""
    count, total, shown = Counter(bar.device for bar in timeline), 0, list[str]()
    for lane in lanes:
        total += count[lane]
        if total > MOST_BARS and shown:
            break
        shown.append(lane)
    return shown


def _lanes_left_out(lanes: int, shown: Sequence[str]) -> str:
    if len(shown) == lanes:
        return ""
    return f"<p>The first {len(shown)} of {lanes} devices and links; timeline.json has all.</p>"


def _tick(at_s: float, words: str, x: float, height: int) -> str:
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#ddd"/>'
    return line + text(x, height, words, ' text-anchor="middle" fill="#666"')


def _kind(bar: Slice) -> str:
    kind = bar.what.split()[0]
    return kind if kind in COLOURS else "messages"


def _slice(bar: Slice, label: float, y: float, scale: float) -> list[str]:
    start, width = label + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
    words = f"{bar.what}: {1e3 * bar.start_s:.2f} to {1e3 * bar.end_s:.2f} ms"
    shapes = [rect(start, y, width - 0.6, COLOURS[_kind(bar)], words)]
    micro = bar.what.rpartition("#")[2] if "#" in bar.what else ""
    if micro and width >= NARROW:
        middle = ' text-anchor="middle" fill="#fff"'
        shapes.append(text(start + width / 2, y, micro, middle))
    return shapes
