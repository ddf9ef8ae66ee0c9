"""Plan -> one self-contained HTML page: stages, memory, cuts, and the forecast step as a picture.

No script, no font and no image from elsewhere: the page opens from a file. This room knows plans
and forecasts; it draws what they say and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from bigbrain_fx.core import Forecast, Slice
from bigbrain_fx.plan.explain import Cut, DevicePart, Explanation, explain
from bigbrain_fx.plan.making import timeline
from bigbrain_fx.plan.nouns import Plan, micro_text

WIDTH = 1000  # of the drawing, in pixels
ROW = 26
LABEL = 90
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weights": "#eeca3b",
    "optimizer": "#54a24b",
}
PARTS = (
    ("weights", "weights_bytes", "#4c78a8"),
    ("gradients", "gradients_bytes", "#f58518"),
    ("optimizer", "optimizer_bytes", "#54a24b"),
    ("activations", "activations_bytes", "#e45756"),
    ("messages", "messages_bytes", "#72b7b2"),
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1040px; color: #222; }
table { border-collapse: collapse; } td, th { padding: .25rem .8rem .25rem 0; text-align: left; }
th { border-bottom: 1px solid #999; } svg text { font: 12px system-ui, sans-serif; }
.key span { margin-right: 1.2rem; } .key i { display: inline-block; width: .8em; height: .8em; }
"""


def report(plan: Plan) -> str:
    """Return the page; the same plan gives the same text."""
    found, forecast = explain(plan), timeline(plan)
    rows = plan.micro_batches * plan.rows
    head = (
        f"{len(plan.stages.stages)} stages on {len(plan.stages.devices)} devices, {plan.schedule}, "
        f"{micro_text(plan.micro_batches)} of {plan.rows} rows; forecast {forecast.step_s:.4f} s "
        f"a step, {rows / forecast.step_s:.1f} rows a second"
    )
    head += f"; {found.recompute}" if found.recompute else ""
    head += f"; {found.split}" if found.split else ""
    head += f"; {found.tensor}" if found.tensor else ""
    title = escape(plan.graph.name)
    return "\n".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            f"<style>{STYLE}</style>",
            f"<h1>{title}</h1><p>{escape(head)}</p>",
            "<h2>Devices</h2>",
            _devices(found.devices),
            "<h2>Memory at the peak</h2>",
            _memory(plan, forecast),
            "<h2>Cuts</h2>",
            _cuts(found),
            "<h2>One step</h2>",
            _gantt(forecast, plan),
            "</html>\n",
        )
    )


def _devices(parts: Sequence[DevicePart]) -> str:
    rows = [
        (
            part.device,
            ", ".join(map(str, part.stages)),
            part.modules,
            str(part.ops),
            f"{part.busy_s:.4f}",
            f"{part.idle_s:.4f}",
        )
        for part in parts
    ]
    return _table(("device", "stages", "modules", "ops", "busy s", "idle s"), rows)


def _cuts(found: Explanation) -> str:
    rows = [
        (
            f"{cut.source} → {cut.target}",
            cut.after,
            f"{cut.nbytes / 2**10:.1f} KiB",
            f"{1e3 * cut.transfer_s:.2f} ms",
            _reasons(found, cut),
        )
        for cut in found.cuts
    ]
    return _table(("stages", "after", "a micro-batch", "each way", "and not elsewhere"), rows)


def _reasons(found: Explanation, cut: Cut) -> str:
    return "; ".join(found.compare(other) for other in cut.alternatives)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _memory(plan: Plan, forecast: Forecast) -> str:
    """Draw a bar per device, of what its peak is made of; the frame is what the device has."""
    has = {e.device: plan.cluster.device[e.device].memory_bytes for e in forecast.devices}
    scale = (WIDTH - LABEL - 10) / max(*has.values(), *(e.peak_bytes for e in forecast.devices))
    shapes: list[str] = []
    for row, entry in enumerate(forecast.devices):
        y, x = row * ROW, float(LABEL)
        shapes.append(_text(0, y, entry.device))
        for name, field, colour in PARTS:
            nbytes = int(getattr(entry, field))
            if plan.mode == "eval" and nbytes == 0:
                continue
            shapes.append(_bar(x, y, nbytes * scale, colour, f"{name} {nbytes / 2**20:.1f} MiB"))
            x += nbytes * scale
        frame = f'x="{LABEL}" y="{y}" width="{has[entry.device] * scale:.2f}" height="{ROW - 6}"'
        shapes.append(f'<rect {frame} fill="none" stroke="#999"/>')
    trained = plan.mode == "train"
    shown = [(n, c) for n, _, c in PARTS if trained or n not in ("gradients", "optimizer")]
    key = "".join(f'<span><i style="background:{c}"></i> {n}</span>' for n, c in shown)
    return f'<p class="key">{key}</p>' + _svg(shapes, len(forecast.devices))


def _gantt(forecast: Forecast, plan: Plan) -> str:
    """Draw who computes what when."""
    devices = plan.stages.devices
    scale = (WIDTH - LABEL - 10) / (forecast.step_s or 1.0)
    shapes = [_text(0, row * ROW, device) for row, device in enumerate(devices)]
    bars = [bar for bar in forecast.timeline if bar.device in devices]
    shapes += [_slice(bar, devices.index(bar.device) * ROW, scale) for bar in bars]
    kinds = dict.fromkeys(bar.what.split()[0] for bar in bars)
    shown = [(name, colour) for name, colour in COLOURS.items() if name in kinds]
    key = "".join(f'<span><i style="background:{c}"></i> {n}</span>' for n, c in shown)
    return f'<p class="key">{key}</p>' + _svg(shapes, len(devices))


def _slice(bar: Slice, y: int, scale: float) -> str:
    colour = COLOURS.get(bar.what.split()[0], "#999")
    label = f"{bar.what}: {1e3 * bar.start_s:.2f} to {1e3 * bar.end_s:.2f} ms"
    return _bar(LABEL + bar.start_s * scale, y, (bar.end_s - bar.start_s) * scale, colour, label)


def _bar(x: float, y: int, width: float, colour: str, label: str) -> str:
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 6}"'
    return f'<rect {place} fill="{colour}" stroke="#fff"><title>{escape(label)}</title></rect>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y + ROW - 12}">{escape(text)}</text>'


def _svg(shapes: Sequence[str], rows: int) -> str:
    size = f'width="{WIDTH}" height="{rows * ROW}"'
    return f'<svg {size} role="img">' + "\n".join(shapes) + "</svg>"
