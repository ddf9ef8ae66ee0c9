"""tools/studies/divided: every row, how far forecasts are off, and what planned shares are
worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from tools.bench.published_gpus.table import spearman
from tools.studies.divided.cells import ALONE, EQUAL, FEW, MICRO_BATCHES, ONE, PLANNED, Row, site_of

WRITE = "python -m tools.studies.divided --out rows.jsonl {more}--write {name}.md"


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    return "\n".join((*_head(rows), *_forecasts(rows), *_worth(rows), *_table(rows), ""))


def _head(rows: Sequence[Row]) -> Iterator[str]:
    times = max((row.batches for row in rows), default=1)
    more, name = (f"--batches {times} ", "larger") if times > 1 else ("", "results")
    yield from (
        "# Replicas and tensor groups: forecast against measured",
        "",
        f"Written by `{WRITE.format(more=more, name=name)}`",
        f"on emulated clusters of CPUs, where each device is a host: {times * MICRO_BATCHES}",
        f"micro-batches ({times * FEW} of replicas and pipelines of tensor groups, {times} of a",
        "group alone), 1F1B, plans by `chain-dp` from ops profiled on the emulated devices: whole",
        "ones of a micro-batch, and the parts of them that members of groups compute",
        "(`bigbrain-fx profile --tensor`). Each way runs in turn with the others. `--batches 4`",
        "gives a step four times as many micro-batches and no more exchanges: larger.md.",
        "",
    )


def _forecasts(rows: Sequence[Row]) -> Iterator[str]:
    yield from ("## Forecasts", "", "| what | rows | mean error | median | worst | Spearman |")
    yield "|---|---|---|---|---|---|"
    divided = [row for row in rows if not row.is_alone]
    kinds = {
        "replicas and ZeRO": [row for row in divided if not row.is_tensor],
        "tensor groups, with and without replicas and pipelines": [
            row for row in divided if row.is_tensor
        ],
        "one device": [row for row in rows if row.is_alone],
    }
    for name, own in kinds.items():
        if own:
            yield f"| {name} | {len(own)} | {_errors(own)} | {_rank(own)} |"
    yield ""


def _errors(rows: Sequence[Row]) -> str:
    off = [row.error for row in rows]
    sizes = sorted(map(abs, off))
    worst = max(off, key=abs)
    return (
        f"{statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | {worst:+.1%}"
    ).replace("%", " %")


def _rank(rows: Sequence[Row]) -> str:
    found = spearman([row.forecast_s for row in rows], [row.measured_s for row in rows])
    return "-" if found is None else f"{found:.3f}"


def _worth(rows: Sequence[Row]) -> Iterator[str]:
    yield from (
        "## What dividing is worth",
        "",
        "Measured, round by round: medians, quartiles in brackets. *Fluid* is work that divides",
        "freely and is sent for nothing: all devices together at the speeds that each has alone,",
        "or, where only the first one was run alone, at the speeds that were ordered.",
        "",
        "| model | cluster | micro-batches | planned over equal shares | replicas over one device "
        "| of fluid |",
        "|---|---|---|---|---|---|",
    )
    for cell in dict.fromkeys(row.cell for row in rows):
        model, site, batches = cell
        by_way = {row.way: row for row in rows if row.cell == cell}
        one, equal, planned = (by_way.get(way) for way in (ONE, EQUAL, PLANNED))
        if one is None or planned is None:
            continue
        fluid = _quartiles(_of_fluid(planned, by_way, site_of(site).speeds))
        shared = _quartiles(_ratios(equal, planned)) if equal is not None else "-"
        gain = _quartiles(_ratios(one, planned))
        yield f"| {model} | {site} | {batches * MICRO_BATCHES} | {shared} | {gain} | {fluid} |"
    yield ""


def _of_fluid(planned: Row, by_way: Mapping[str, Row], speeds: Sequence[float]) -> list[float]:
    """Return, round by round, the fluid step over the one that was measured."""
    one = by_way[ONE]
    alone = {speed: by_way.get(f"{ALONE}{speed:g}") for speed in speeds[1:]}

    def steps_a_s(turn: int, speed: float) -> float:
        own = one if speed == speeds[0] else alone[speed]
        if own is None or len(own.step_s) != len(one.step_s):
            return speed / speeds[0] / one.step_s[turn]
        return 1 / own.step_s[turn]

    return [
        1 / sum(steps_a_s(turn, speed) for speed in speeds) / taken_s
        for turn, taken_s in enumerate(planned.step_s)
    ]


def _ratios(slow: Row, fast: Row) -> list[float]:
    return [a / b for a, b in zip(slow.step_s, fast.step_s, strict=True)]


def _quartiles(ratios: Sequence[float]) -> str:
    middle = f"{statistics.median(ratios):.2f}"
    if len(ratios) < 4:
        return middle
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{middle} ({low:.2f} to {high:.2f})"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield from ("## Rows", "")
    yield "| model | cluster | way | shares | forecast s | measured s | error | busy |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        divided = ":".join(map(str, row.shares)) or "-"
        way = row.way if row.batches == 1 else f"{row.way}, batch x {row.batches}"
        yield (
            f"| {row.model} | {row.site} | {way} | {divided} | {row.forecast_s:.3f} "
            f"| {row.measured_s:.3f} | {100 * row.error:+.1f} % "
            f"| {100 * statistics.median(row.busy):.0f} % |"
        )
