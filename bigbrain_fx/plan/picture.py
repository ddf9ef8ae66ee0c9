"""A step as drawings: who computes what when, and what each device holds, over one time axis.

Plain SVG that scales with its page. This room knows timelines; it knows nothing of plans or pages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bigbrain_fx.core import Slice

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
    return (
        key(shown) + svg(shapes, height + AXIS) + _left_out(len(devices) + len(set(links)), lanes)
    )


@dataclass(frozen=True)
class Curve:
    """What one device holds over a step.

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


def _left_out(lanes: int, shown: Sequence[str]) -> str:
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
