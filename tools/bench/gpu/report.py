"""Tables of rows of `tools.bench.gpu`, for a terminal and for the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tools.bench.gpu.rows import Family, Rates, Row

STEP_GOAL, MEMORY_GOAL = 0.10, 0.05
ESTIMATORS = ("measured", "analytical", "preset")
COMMAND = "python -m tools.bench gpu --out rows.jsonl --write gpu_measured.md"


@dataclass(frozen=True)
class Summary:
    """All rows: errors by estimator, and of memory; `..._within` count rows within the goals."""

    rows: int
    step_mape: Mapping[str, float]
    step_worst: Mapping[str, float]
    step_within: Mapping[str, int]
    memory_mape: float
    memory_worst: float
    memory_within: int
    step_goal: float = STEP_GOAL
    memory_goal: float = MEMORY_GOAL


def summary(rows: Sequence[Row]) -> Summary:
    """Sum up at least one row."""
    errors = {name: _errors(rows, name) for name in ESTIMATORS if _errors(rows, name)}
    memory = [row.memory_error for row in rows]
    return Summary(
        len(rows),
        {name: statistics.fmean(map(abs, found)) for name, found in errors.items()},
        {name: max(found, key=abs) for name, found in errors.items()},
        {name: _within(found, STEP_GOAL) for name, found in errors.items()},
        statistics.fmean(map(abs, memory)),
        max(memory, key=abs),
        _within(memory, MEMORY_GOAL),
    )


def _errors(rows: Sequence[Row], estimator: str) -> Sequence[float]:
    return [row.error(estimator) for row in rows if estimator in row.forecast_s]


def _within(errors: Sequence[float], goal: float) -> int:
    return sum(abs(error) <= goal for error in errors)


# --------------------------------------------------------------------------- tables


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Yield all tables as lines of Markdown, card by card; the latest row speaks for a card."""
    for card in dict.fromkeys(row.card for row in rows):
        of_card = [row for row in rows if row.card == card]
        last = max(of_card, key=lambda row: row.date)
        yield f"## {card}\n"
        yield f"torch {last.torch}, {last.date}. {_text(summary(of_card))}\n"
        facts = list(_facts(last))
        if facts:
            yield f"{' '.join(facts)}\n"
        yield from _steps(of_card)
        yield "\nWhat the device sustains, against its datasheet:\n"
        yield from _rates(last)
        yield "\nOps by family, over all models of the table:\n"
        yield from _ops(of_card)
        yield ""


def _facts(row: Row) -> Iterator[str]:
    if row.blas_bytes:
        yield f"A workspace of cuBLAS has {_mib(row.blas_bytes)}."
    if row.products_use_tf32 is not None:
        yield f"Products in float32 {'may' if row.products_use_tf32 else 'do not'} use TF32."
    if row.profiled_launch_s is not None and row.doctor.launch_s is not None:
        doctor, profile = (1e6 * s for s in (row.doctor.launch_s, row.profiled_launch_s))
        yield f"An op's start took {doctor:.2f} us by doctor, {profile:.2f} us by the profile."


def _text(found: Summary) -> str:
    by = "; ".join(
        f"{name} {_percent(found.step_mape[name])}, worst {_signed(found.step_worst[name])}, "
        f"{found.step_within[name]} of {found.rows} within {STEP_GOAL:.0%}"
        for name in found.step_mape
    )
    return (
        f"Mean error of the step: {by}. Of memory: {_percent(found.memory_mape)}, worst "
        f"{_signed(found.memory_worst)}, {found.memory_within} of {found.rows} within "
        f"{MEMORY_GOAL:.0%}."
    )


def _steps(rows: Sequence[Row]) -> Iterator[str]:
    estimators = [name for name in ESTIMATORS if any(name in row.forecast_s for row in rows)]
    goals = f"step (goal: within {STEP_GOAL:.0%})", f"memory (goal: within {MEMORY_GOAL:.0%})"
    yield from _head("model", "size", goals[0], *estimators, "profiled", goals[1], "forecast", "")
    for row in rows:
        said = [_forecast(row, name) for name in estimators]
        sizes = _mib(row.measured_bytes), _mib(row.forecast_bytes), _signed(row.memory_error)
        yield _line(row.model, row.size, _ms(row.measured_s), *said, f"{row.covered:.0%}", *sizes)


def _forecast(row: Row, estimator: str) -> str:
    if estimator not in row.forecast_s:
        return "-"
    return f"{_ms(row.forecast_s[estimator])} ({_signed(row.error(estimator))})"


def _rates(row: Row) -> Iterator[str]:
    sheet = row.datasheet
    yield from _head("", "doctor", f"datasheet ({row.preset})" if sheet else "datasheet", "ratio")
    rows: tuple[tuple[str, Callable[[Rates], float | None], float, str], ...] = (
        ("float32 products", lambda r: r.flops_per_s, 1e12, "TFLOP/s"),
        ("bfloat16 products", lambda r: r.half_flops_per_s, 1e12, "TFLOP/s"),
        ("memory", lambda r: r.memory_bytes_per_s, 1e9, "GB/s"),
        ("free memory", lambda r: r.memory_bytes, 1e9, "GB"),
        ("an op's start", lambda r: r.launch_s, 1e-6, "us"),
    )
    for what, of, unit, name in rows:
        found, said = of(row.doctor), of(sheet) if sheet else None
        ratio = f"{found / said:.2f}" if found and said else "-"
        yield _line(what, _in(found, unit, name), _in(said, unit, name), ratio)


def _in(value: float | None, unit: float, name: str) -> str:
    return "-" if value is None else f"{value / unit:.4g} {name}"


def _ops(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each family, the dearest first; shares of the roofline one way each."""
    found = families([family for row in rows for family in row.ops])
    total_s = sum(family.measured_s for family in found) or 1.0
    heads = ("measured", "share", "analytical", "error", "roofline forward", "roofline backward")
    yield from _head("family", "ops", *heads)
    for family in found:
        yield _line(
            family.name,
            str(family.ops),
            _ms(family.measured_s),
            f"{family.measured_s / total_s:.1%}",
            _ms(family.analytical_s),
            _signed(family.analytical_s / family.measured_s - 1) if family.measured_s else "-",
            _share(family.roofline_forward_s, family.forward_s),
            _share(family.roofline_backward_s, family.backward_s),
        )


def families(each: Sequence[Family]) -> Sequence[Family]:
    """Add up families of the same name; the dearest first."""
    names = [f.name for f in fields(Family) if f.name != "name"]
    sums: dict[str, Family] = {}
    for family in each:
        had = sums.get(family.name)
        added = {n: getattr(family, n) + getattr(had, n) for n in names} if had else None
        sums[family.name] = Family(family.name, **added) if added else family
    return sorted(sums.values(), key=lambda family: (-family.measured_s, family.name))


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Write the page."""
    path.write_text("\n".join((PAGE, *report(rows))).rstrip() + "\n")


PAGE = f"""# One GPU: forecast against measured

Written by `{COMMAND}`; do not edit.

Each model is profiled op by op, planned on the one device, written as a bundle, and run as its
users run it: the median step after the warm-up. Memory is `torch.cuda.max_memory_allocated` of the
bundle's process, on a CPU the peak of its live tensors. *measured* forecasts with the profiled ops,
*analytical* with the roofline at the rates that `doctor` found, *preset* with the datasheet's.
A share of the roofline is what flops (or, where they take longer, bytes) would take at doctor's
rates, over what the ops took: `estimators/op_rules.py` has the shares that `analytical` assumes.
Of float32, convolutions use TF32 from Ampere on, as torch comes, and products do not unless a
card's section says so: a convolution's share may be above 1.
"""


def _head(*cells: str) -> Iterator[str]:
    yield _line(*cells)
    yield "|" + "|".join("---" if i == 0 else "---:" for i in range(len(cells))) + "|"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _share(roofline_s: float, taken_s: float) -> str:
    return f"{roofline_s / taken_s:.2f}" if taken_s else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"
