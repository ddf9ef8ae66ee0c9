"""tools/studies/dp_vs_mp and its plot, from rows. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tools.studies.dp_vs_mp.cells import MBIT_PER_S, MODELS, ONE, ROWS, SWEEP, WAYS, StudyRow, cells
from tools.studies.dp_vs_mp.scaling import LOCAL_BATCH, REPLICAS, TARGET, Scaled, wanted

PERFECT, SOME = 1.8, 1.2  # times fewer steps for twice the batch: of the first regime; the second
LEAST = 8  # rows a device, of the curve of seconds with a device for each so many
Rows = Mapping[tuple[str, int, str, float], StudyRow]

_HEAD = (
    "# Data parallel against model parallel",
    "",
    "The founders' own study, by `python -m tools.studies.dp_vs_mp --out rows.jsonl --write "
    "tools/studies/dp_vs_mp`. Four models",
    "on one, two and four emulated devices (`studies/emulation`: a quarter of a core each, links "
    "of their own), all bundles of",
    "`split`: pipelines cut evenly (`naive`, 1F1B), replicas, both, ZeRO 1 and 3; four "
    "micro-batches a step. Seconds are the",
    "median of three steps after the first. **Sent** is all messages of a step, as planned; "
    "**MiB a device** what the fullest",
    "one's tensors take, as forecast, and by how much its process grew beyond Python and torch.",
)


def page(rows: Sequence[StudyRow], curve: Sequence[Scaled], plot: str) -> str:
    """Return the page."""
    by_key = {row.key: row for row in rows}
    lines = [*_HEAD, "", _measured(rows, curve), "", f"![]({plot})", ""]
    for name in MODELS:
        lines += [f"## {name}, {ROWS} rows a step", "", *_ways(name, by_key), ""]
    lines += [f"## Batches, {MBIT_PER_S[0]:g} Mbit/s", "", *_sweep(by_key), ""]
    lines += ["## Three regimes of a larger batch", "", *_regimes(curve), ""]
    lines += ["## Weights averaged every k steps", "", *_local(curve), ""]
    return "\n".join(lines)


def _measured(rows: Sequence[StudyRow], curve: Sequence[Scaled]) -> str:
    cell_count, curve_count = len([*cells()]), len([*wanted()])
    said = f"{len(rows)} of {cell_count} cells and {len(curve)} of {curve_count} trainings are here"
    if not rows:
        return f"{said}."
    loads = sorted(row.load for row in rows)
    return (
        f"{said}. The machine's load when a cell began (the cell before it among it) was "
        f"{loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}, on two cores: "
        "above about 2, others were there, and seconds are too long."
    )


def _ways(name: str, rows: Rows) -> Iterator[str]:
    if not any(key[:2] == (name, ROWS) for key in rows):
        yield "Not measured yet."
        return
    yield "| | Mbit/s | rows/s | of one device | MB sent | MiB a device, forecast | resident |"
    yield "|---|---|---|---|---|---|---|"
    one = rows.get((name, ROWS, str(ONE), MBIT_PER_S[0]))
    if one is not None:
        yield _line(one, one, "-")
    for way in WAYS:
        for mbit_per_s in MBIT_PER_S:
            found = rows.get((name, ROWS, str(way), mbit_per_s))
            if found is not None:
                yield _line(found, one, f"{mbit_per_s:g}")


def _line(row: StudyRow, one: StudyRow | None, rate: str) -> str:
    times = f"{row.rows_per_s / one.rows_per_s:.2f}x" if one else ""
    return (
        f"| {row.way} | {rate} | {row.rows_per_s:.0f} | {times} | {row.sent_bytes / 1e6:.2f} | "
        f"{row.peak_bytes / 2**20:.1f} | {row.resident_bytes / 2**20:.1f} |"
    )


def _sweep(rows: Rows) -> Iterator[str]:
    yield "Rows a second, as times those of one device:"
    yield ""
    yield "| | rows a step | one device, rows/s | pipeline of 4 | 4 replicas |"
    yield "|---|---|---|---|---|"
    for name in MODELS:
        for batch in sorted((ROWS, *SWEEP[name])):
            ways = (str(ONE), "pipeline, 4 devices", "replicas, 4 devices")
            found = [rows.get((name, batch, way, MBIT_PER_S[0])) for way in ways]
            one, others = found[0], found[1:]
            if one is not None:
                shares = [f"{r.rows_per_s / one.rows_per_s:.2f}x" if r else "" for r in others]
                yield f"| {name} | {batch} | {one.rows_per_s:.0f} | {' | '.join(shares)} |"


# --------------------------------------------------------------------------- digits


def regimes(curve: Sequence[Scaled]) -> tuple[int | None, int | None]:
    """Return the largest batch of the first regime, and of the second; None: there is none.

    Perfect: twice the batch takes at most 1/1.8 of the steps. Diminishing: at most 1/1.2.
    """
    ends: list[int | None] = [None, None]
    for number, limit in enumerate((PERFECT, SOME)):
        for small, large in pairwise(_alone(curve)):
            if not small.median / large.median >= limit:
                break
            ends[number] = large.batch
    return ends[0], ends[1]


def _alone(curve: Sequence[Scaled]) -> list[Scaled]:
    return sorted((row for row in curve if not row.every), key=lambda row: row.batch)


def _regimes(curve: Sequence[Scaled]) -> Iterator[str]:
    alone = _alone(curve)
    if len(alone) < 2:
        yield "Not measured yet."
        return
    yield (
        f"Digits to {TARGET:.0%} on images never trained on, SGD with momentum, for each batch the "
        "best of six rates, median of three seeds. Seconds are processor time of one device; the "
        f"last column has a device for each {LEAST} rows, and messages that cost nothing."
    )
    yield ""
    yield f"| rows a step | rate | steps | s, one device | s, a device for {LEAST} rows |"
    yield "|---|---|---|---|---|"
    for row in alone:
        ideal_s = row.median * alone[0].step_s * LEAST / alone[0].batch
        yield (
            f"| {row.batch} | {row.rate:g} | {row.median:g} | {row.median * row.step_s:.2f} | "
            f"{ideal_s:.2f} |"
        )
    perfect, some = regimes(curve)
    yield ""
    yield _verdict(perfect, some)


def _verdict(perfect: int | None, some: int | None) -> str:
    if perfect is None:
        ends = "at once" if some is None else f"after a batch of {some}"
        return (
            f"No batch here scales perfectly (twice the batch, 1/{PERFECT:g} of the steps): "
            f"replicas cost extra steps from the first, and what they gain ends {ends}."
        )
    return (
        f"Scaling is perfect (twice the batch, at most 1/{PERFECT:g} of the steps) up to a batch "
        f"of {perfect}, diminishing (1/{SOME:g}) up to {some}, and then there is none. So "
        f"`--replicas` pays in full while replicas together compute at most {perfect} rows a step: "
        f"{perfect // LEAST} of {LEAST} rows. Beyond {some}, more replicas end no sooner, whatever "
        "the network: give further devices to pipelines."
    )


def _local(curve: Sequence[Scaled]) -> Iterator[str]:
    local = sorted((row for row in curve if row.every), key=lambda row: row.every)
    base = next((row for row in curve if row.key == (LOCAL_BATCH, 0)), None)
    if not local or base is None:
        yield "Not measured yet."
        return
    yield (
        f"{REPLICAS} replicas of {LOCAL_BATCH // REPLICAS} rows, in plain PyTorch in one process "
        "(`split` has no `--sync-every`): each steps by itself, weights are averaged every k "
        "steps, each keeps its momentum."
    )
    yield ""
    yield "| | rate | steps | sums sent to 95 % |"
    yield "|---|---|---|---|"
    yield f"| gradients, every step | {base.rate:g} | {base.median:g} | {base.median:g} |"
    for row in local:
        sums = row.median / row.every
        yield f"| weights, every {row.every} | {row.rate:g} | {row.median:g} | {sums:g} |"


def draw(path: Path, rows: Sequence[StudyRow], curve: Sequence[Scaled]) -> None:
    """Write the plots as SVG, the same text for the same numbers."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "bigbrain-fx", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        speed, steps = figure.subplots(1, 2)
        by_key, places = {row.key: row for row in rows}, range(len(MODELS))
        ways = [way for way in WAYS if way.devices == 4]
        for number, way in enumerate(ways):
            for mbit_per_s, alpha in zip(MBIT_PER_S, (1.0, 0.5), strict=True):
                found = [by_key.get((name, ROWS, str(way), mbit_per_s)) for name in MODELS]
                ones = [by_key.get((name, ROWS, str(ONE), MBIT_PER_S[0])) for name in MODELS]
                pairs = zip(found, ones, strict=True)
                heights = [a.rows_per_s / b.rows_per_s if a and b else 0.0 for a, b in pairs]
                left = [place + 0.16 * number - 0.32 for place in places]
                width = 0.15 if alpha == 1.0 else 0.08
                label = way.name if alpha == 1.0 else None
                speed.bar(left, heights, width, alpha=alpha, color=f"C{number}", label=label)
        speed.set_xticks([*places], [*MODELS])
        speed.set_ylabel("rows/s, of one device; wide 1 Gbit/s, narrow 100 Mbit/s")
        speed.legend(fontsize=6)
        alone = _alone(curve)
        if alone:
            batches = [row.batch for row in alone]
            steps.loglog(batches, [row.median for row in alone], "o-", label="steps")
            first = alone[0].median * alone[0].batch
            steps.loglog(batches, [first / b for b in batches], ":", label="perfect")
            steps.legend(fontsize=7)
        steps.set_xlabel("rows a step")
        steps.set_ylabel("steps to 95 % on digits")
        figure.savefig(path, format="svg", metadata={"Date": None})
