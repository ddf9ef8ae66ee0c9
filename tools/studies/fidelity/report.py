"""What rows of `fidelity` come to: errors, noise, ranks, regret, memory. It runs nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigbrain_fx.plan.memory_check import PROCESS
from tools.studies.fidelity.cells import is_held_out
from tools.studies.fidelity.rows import Row

CANDIDATES = 12  # fewer plans of one model and cluster are not ranked


@dataclass(frozen=True)
class Summary:
    """What all rows come to; None where there is nothing to tell it from.

    Errors of step times are of held-out cells, times `factor`, which the others would have them
    multiplied by; those that end in `raw` are without it. Ranks and regret are means over the
    held-out pairs of model and cluster with enough candidates; there, what differs by less than the
    floor counts as equal, but in `spearman_strict` and `regret_strict`. Memory is of all devices of
    all rows.
    """

    source: str
    cells: int
    held_out_cells: int
    noise_floor: float | None
    mape: float | None
    median: float | None
    worst: float | None
    factor: float | None
    mape_raw: float | None
    worst_raw: float | None
    bias_raw: float | None
    mape_of_calibrating: float | None
    ranked_pairs: int
    spearman: float | None
    spearman_strict: float | None
    regret: float | None
    regret_strict: float | None
    memory_devices: int
    memory_mape: float | None
    memory_worst: float | None
    memory_under: float | None
    resident_devices: int
    resident_over_reserved: int


def summary(rows: Sequence[Row], source: str) -> Summary:
    """Put all rows together, for one source of forecasts."""
    held_out = [row for row in rows if is_held_out(row.cell)]
    others = [row for row in rows if not is_held_out(row.cell)]
    floor = noise_floor(rows)
    factor = calibration(others, source)
    errors = [row.error(source, factor or 1.0) for row in held_out]
    raw = [row.error(source) for row in held_out]
    pairs = ranked_pairs(held_out)
    ranks = [_ranks(pair, source) for pair in pairs]
    memory = [error for row in rows for error in row.memory_errors]
    resident = [(n, reserved(row, d)) for row in rows for d, n in row.resident_bytes.items()]
    return Summary(
        source=source,
        cells=len(rows),
        held_out_cells=len(held_out),
        noise_floor=floor,
        mape=_mean([abs(e) for e in errors]),
        median=statistics.median(map(abs, errors)) if errors else None,
        worst=max(map(abs, errors), default=None),
        factor=factor,
        mape_raw=_mean([abs(e) for e in raw]),
        worst_raw=max(map(abs, raw), default=None),
        bias_raw=_mean(raw),
        mape_of_calibrating=_mean([abs(row.error(source, factor or 1.0)) for row in others]),
        ranked_pairs=len(pairs),
        spearman=_mean([spearman(f, m, floor or 0.0) for f, m in ranks]),
        spearman_strict=_mean([spearman(f, m, 0.0) for f, m in ranks]),
        regret=_mean([regret(f, m, floor or 0.0) for f, m in ranks]),
        regret_strict=_mean([regret(f, m, 0.0) for f, m in ranks]),
        memory_devices=len(memory),
        memory_mape=_mean([abs(e) for e in memory]),
        memory_worst=max(map(abs, memory), default=None),
        memory_under=min(memory, default=None),
        resident_devices=len(resident),
        resident_over_reserved=sum(found > reserved for found, reserved in resident),
    )


def reserved(row: Row, device: str) -> int:
    """Return what a plan is refused by today, for a device (all are CPUs) of a row."""
    process = PROCESS["cpu"]
    return int(row.forecast_bytes[device] * process.share) + process.context_bytes


def noise_floor(rows: Sequence[Row]) -> float | None:
    """Return the repeat-to-repeat MAPE: of each run taken as a forecast of each other of its cell.

    None without a cell that was run twice.
    """
    of_cell = []
    for row in rows:
        runs = row.runs
        off = [abs(a / b - 1) for i, a in enumerate(runs) for j, b in enumerate(runs) if i != j]
        if off:
            of_cell.append(statistics.fmean(off))
    return _mean(of_cell)


def calibration(rows: Sequence[Row], source: str) -> float | None:
    """Return the one factor that makes forecasts right in the middle; None without rows."""
    return statistics.median(1 / (1 + row.error(source)) for row in rows) if rows else None


def best_source(rows: Sequence[Row]) -> str:
    """Return the ground of forecasts that is best on the cells to calibrate with, its factor on.

    Without such cells the first one.
    """
    others = [row for row in rows if not is_held_out(row.cell)]
    names = list(rows[0].forecast_s) if rows else []
    if not others:
        return names[0]

    def left(name: str) -> float:
        factor = calibration(others, name) or 1.0
        return statistics.fmean(abs(row.error(name, factor)) for row in others)

    return min(names, key=left)


def ranked_pairs(rows: Sequence[Row]) -> Sequence[Sequence[Row]]:
    """Return the rows of each model and cluster that has enough candidates."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault(row.cell.pair, []).append(row)
    return [pair for pair in found.values() if len(pair) >= CANDIDATES]


def candidates(pair: Sequence[Row]) -> Sequence[Sequence[Row]]:
    """Put the rows together that are one plan: two splits may come out as the same.

    They have one schedule, and one forecast by every ground.
    """
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in pair:
        same = (row.cell.schedule, *(round(s, 9) for s in row.forecast_s.values()))
        found.setdefault(same, []).append(row)
    return list(found.values())


def _ranks(pair: Sequence[Row], source: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return what was forecast and measured of each candidate: the median of all its runs."""
    found = candidates(pair)
    measured = [statistics.median([run for row in rows for run in row.runs]) for rows in found]
    return [rows[0].forecast(source) for rows in found], measured


def spearman(forecast: Sequence[float], measured: Sequence[float], floor: float) -> float:
    """Return Spearman's rank correlation; measurements inside the floor are in no order.

    From the fastest on, those that are slower by less than `floor` than the first of their group
    are a group; within a group a forecast may order them as it likes. Equal forecasts share their
    middle rank. 1.0 where nothing can be told apart, but 0.0 where forecasts do not tell apart what
    measurements do.
    """
    groups = _groups(measured, floor)
    if max(groups) == 0:
        return 1.0
    left = _middle_ranks(forecast)
    right = _middle_ranks(list(zip(groups, forecast, strict=True)))
    return 0.0 if len(set(left)) == 1 else statistics.correlation(left, right)


def regret(forecast: Sequence[float], measured: Sequence[float], floor: float) -> float:
    """Return how much slower than the best the choice of the forecast is; 0.0 inside the floor.

    Of equally good forecasts the first is chosen, as `make_plan` does.
    """
    chosen = min(range(len(forecast)), key=forecast.__getitem__)
    slower = measured[chosen] / min(measured) - 1
    return slower if slower > floor else 0.0


def _groups(values: Sequence[float], floor: float) -> Sequence[int]:
    groups, number, first = [0] * len(values), -1, -math.inf
    for i in sorted(range(len(values)), key=values.__getitem__):
        if number < 0 or values[i] > first * (1 + floor):
            number, first = number + 1, values[i]
        groups[i] = number
    return groups


def _middle_ranks(keys: Sequence[float] | Sequence[tuple[int, float]]) -> Sequence[float]:
    """Return each key's rank from 1; equal ones share the middle of theirs."""
    ordered = sorted(keys)
    first = {key: i for i, key in reversed(list(enumerate(ordered)))}
    last = {key: i for i, key in enumerate(ordered)}
    return [1 + (first[key] + last[key]) / 2 for key in keys]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# --------------------------------------------------------------------------- text


HEADER = (
    f"{'cell':<40}{'measured':>10}{'floor':>8}{'forecast':>10}{'error':>9}{'covered':>9}"
    f"{'memory':>9}"
)


def row_line(row: Row, source: str) -> str:
    """Show a row: seconds measured, its runs' spread, seconds forecast, errors."""
    floor = noise_floor([row])
    held = " " if is_held_out(row.cell) else "c"
    memory = max(row.memory_errors, key=abs, default=None)
    return (
        f"{held} {row.cell!s:<38}{row.measured_s:>9.3f}s{percent(floor):>8}"
        f"{row.seconds(source):>9.3f}s{100 * row.error(source):>+7.1f} %"
        f"{percent(row.covered):>9}{'' if memory is None else f'{100 * memory:+.1f} %':>9}"
    )


def percent(value: float | None) -> str:
    """Write a share in percent; a dash for nothing."""
    return "-" if value is None else f"{100 * value:.1f} %"


def summary_lines(found: Summary) -> Iterator[str]:
    """Say in words what the rows come to."""
    yield (
        f"{found.cells} cells, {found.held_out_cells} of them held out (others are marked c); "
        f"repeat-to-repeat {percent(found.noise_floor)}; forecast by {found.source}"
    )
    yield (
        f"step time, times {found.factor or 1.0:.3f} by the cells marked c: mean error "
        f"{percent(found.mape)}, median {percent(found.median)}, worst {percent(found.worst)}; as "
        f"forecast: {percent(found.mape_raw)}, worst {percent(found.worst_raw)}, bias "
        f"{percent(found.bias_raw)}"
    )
    if found.spearman is not None and found.spearman_strict is not None:
        yield (
            f"ranks, {found.ranked_pairs} pairs: Spearman {found.spearman:.3f} "
            f"(strictly {found.spearman_strict:.3f}), regret {percent(found.regret)} "
            f"(strictly {percent(found.regret_strict)})"
        )
    yield (
        f"memory, {found.memory_devices} devices: mean error {percent(found.memory_mape)}, worst "
        f"{percent(found.memory_worst)}, lowest {percent(found.memory_under)}; resident above "
        f"reserved: {found.resident_over_reserved} of {found.resident_devices}"
    )
