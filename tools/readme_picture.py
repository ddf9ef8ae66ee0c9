"""The picture of README: a GPT cut over one fast and two slow devices, and one step of it.

    python -m tools.readme_picture          writes docs/pipeline.svg

The cluster is CLUSTER, the plan that of `bigbrain-fx estimate`; the timeline is the one that a
bundle's report.html shows, drawn by the same functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import bigbrain_fx as bb
from bigbrain_fx.plan.explanation import explain
from bigbrain_fx.plan.making import timeline
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.plan_report import COLOURS, WIDTH, gantt, text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/pipeline.svg"
MODEL = ROOT / "models/gpt.py"
SPEEDS = {"fast": 60, "slow0": 25, "slow1": 25}
LINKS = {"default": {"bandwidth": "1Gbit/s", "latency": "0.2ms"}}
CLUSTER = {
    "devices": [
        {
            "name": name,
            "kind": "cpu",
            "memory": "8GiB",
            "flops": f"{rate}GFLOP/s",
            "memory_bandwidth": f"{rate // 5}GB/s",
        }
        for name, rate in SPEEDS.items()
    ],
    "links": LINKS,
}
GAP, TOP, BOX = 16, 34, 62
STYLE = (
    "text { font: 13px system-ui, sans-serif; } .small { fill: #555; } .bold { font-weight: 600; }"
)


def picture(plan: Plan) -> str:
    """Return the SVG: stages in boxes as wide as their work, then the forecast's timeline."""
    forecast = timeline(plan)
    drawn = gantt(forecast.timeline, plan.stages.devices, forecast.step_s)
    found = re.search(r'<svg viewBox="0 0 \d+ (\d+)".*?>(.*)</svg>', drawn, re.DOTALL)
    assert found is not None
    below = TOP + BOX + 56
    height = below + int(found[1]) + 8
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {WIDTH + 24} {height}">',
            f"<style>{STYLE}</style>",
            f'<rect x="-12" width="{WIDTH + 24}" height="{height}" fill="#fff"/>',
            text(0, 0, "models/gpt.py, cut over one fast and two slow devices", ' class="bold"'),
            *_boxes(plan),
            text(0, TOP + BOX + 6, "One training step, by forecast", ' class="bold"'),
            *_key(TOP + BOX + 6),
            f'<g transform="translate(0 {below - 10})">{found[2]}</g>',
            "</svg>\n",
        )
    )


def _boxes(plan: Plan) -> Iterator[str]:
    """Yield a box for each stage, in the order of the pipeline."""
    stages = plan.stages.stages
    modules = {part.device: part.modules for part in explain(plan).devices}
    width = (WIDTH - GAP * (len(stages) - 1)) / len(stages)
    for number, stage in enumerate(stages):
        x = number * (width + GAP)
        colour = "#dbe7f3" if stage.device == "fast" else "#f1f1f1"
        place = f'x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{BOX}" rx="6"'
        yield f'<rect {place} fill="{colour}"/>'
        speed = f"{stage.device}: {SPEEDS[stage.device]} GFLOP/s"
        yield text(x + 12, TOP + 6, speed, ' class="bold"')
        yield text(x + 12, TOP + 30, modules[stage.device], ' class="small"')
        if number:
            line = f"M{x - GAP:.1f} {TOP + BOX / 2} h{GAP - 3} m-5 -4 l5 4 l-5 4"
            yield f'<path d="{line}" fill="none" stroke="#555"/>'


def _key(y: float) -> Iterator[str]:
    """Yield what the colours of the bars mean."""
    for place, (name, colour) in enumerate(c for c in COLOURS.items() if c[0] != "weights"):
        x = 300 + 130 * place
        yield f'<rect x="{x}" y="{y + 4}" width="12" height="12" fill="{colour}"/>'
        yield text(x + 18, y, name, ' class="small"')


def drawn() -> str:
    """Return the picture of today's plan."""
    cluster = bb.parse_cluster(json.dumps(CLUSTER), "README")
    return picture(bb.estimate(MODEL, cluster, bb.Options(micro_batches=8)))


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
