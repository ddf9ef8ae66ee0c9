"""Rates, links and overheads from the files of a probe's processes, and their text.

This module knows numbers; it knows neither what was started nor what becomes of a cluster.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from bigbrain_fx.core import KERNEL, Link, Overheads

_LARGE_PRODUCT = {"cpu": 2**25, "cuda": 2**30}  # rows x inner x columns
_ALIKE = 0.1  # links that differ by less are told as one

Kind = Literal["cpu", "cuda"]
Result = Mapping[str, Any]
"""What one process wrote."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one device: FP32 matrix products, copies (read and write), tiny ops."""

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float

    def __str__(self) -> str:
        return (
            f"{self.flops_per_s / 1e9:.1f} GFLOP/s, {self.memory_bytes_per_s / 1e9:.1f} GB/s, "
            f"{self.launch_s * 1e6:.1f} us per op"
        )


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Rate of a product of (rows, inner) by (inner, columns) in one dtype."""

    dtype: str
    rows: int
    inner: int
    columns: int
    flops_per_s: float


def rates_of(results: Sequence[Result]) -> Rates:
    """Return the middle of what some processes found."""

    def middle(key: str) -> float:
        return statistics.median(float(result[key]) for result in results)

    return Rates(middle("flops_per_s"), middle("memory_bytes_per_s"), middle("launch_s"))


def table_of(results: Sequence[Result]) -> tuple[MatmulRate, ...]:
    """Return the middle of what some processes found, entry by entry."""
    tables = [result["matmul"] for result in results]
    return tuple(
        MatmulRate(
            **{**rows[0], "flops_per_s": statistics.median(row["flops_per_s"] for row in rows)}
        )
        for rows in zip(*tables, strict=True)
    )


def half_flops_per_s(table: Sequence[MatmulRate], kind: Kind) -> float | None:
    """Return the middle rate of bfloat16, small products left out; None if none was measured.

    Of float16 where the table has no bfloat16: see `measure.dtypes`.
    """
    dtype = "bfloat16" if any(rate.dtype == "bfloat16" for rate in table) else "float16"
    large = [
        rate.flops_per_s
        for rate in table
        if rate.dtype == dtype and rate.rows * rate.inner * rate.columns >= _LARGE_PRODUCT[kind]
    ]
    return statistics.median(large) if large else None


def tf32_flops_per_s(kernels: Mapping[str, float]) -> float | None:
    """Return the middle rate of the timed products in TF32; None where there were none."""
    found = [
        2.0 * prod(KERNEL[name].sizes) / took_s
        for name, took_s in kernels.items()
        if (KERNEL[name].family, KERNEL[name].precision) == ("linear", "tf32")
    ]
    return statistics.median(found) if found else None


def overheads_of(results: Sequence[Result]) -> Overheads:
    """Return the middle of what some processes found, to three digits."""
    found = [result["overheads"] for result in results]

    def middle(key: str) -> float:
        return three_digits(statistics.median(float(entry[key]) for entry in found))

    return Overheads(
        middle("message_s"),
        middle("message_bytes_per_s"),
        middle("instruction_s"),
        middle("step_s"),
    )


def link_between(results: Sequence[Result], a: int, b: int) -> Link:
    """Return the link between two ranks: the mean of what its two ends found."""
    ends = [
        entry
        for rank, peer in ((a, b), (b, a))
        for entry in results[rank]["links"]
        if entry["peer"] == peer
    ]
    return Link(
        statistics.mean(end["latency_s"] for end in ends),
        statistics.mean(end["bytes_per_s"] for end in ends),
    )


def are_alike(links: Sequence[Link]) -> bool:
    """Return whether links differ by less than a tenth, in latency and in rate."""
    latencies, rates = [link.latency_s for link in links], [link.bytes_per_s for link in links]
    return all(max(ends) <= (1 + _ALIKE) * min(ends) for ends in (latencies, rates) if ends)


def slowest(links: Sequence[Link]) -> Link:
    """Return the link with the lowest rate."""
    return min(links, key=lambda link: link.bytes_per_s)


# ---------------------------------------------------------------------- as people read them


def table_lines(table: Sequence[MatmulRate]) -> list[str]:
    """Show, for each dtype, the slowest and the fastest product."""
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in table):
        rows = sorted((row for row in table if row.dtype == dtype), key=lambda r: r.flops_per_s)
        ends = (f"{r.flops_per_s / 1e9:.1f} ({r.rows}x{r.inner}x{r.columns})" for r in rows[::-1])
        shown = list(ends)
        lines.append(f"matmul    {dtype}: {shown[-1]} to {shown[0]} GFLOP/s")
    return lines


def link_text(link: Link) -> str:
    """Write a link as people read it."""
    return f"{link.latency_s * 1e6:.0f} us, {link.bytes_per_s / 1e9:.2f} GB/s"


def overheads_text(own: Overheads) -> str:
    """Write overheads as people read them."""
    rate = own.message_bytes_per_s
    handled = f" and {rate / 1e9:.2f} GB/s" if rate else ""
    return (
        f"{own.message_s * 1e6:.0f} us a message{handled}, "
        f"{own.instruction_s * 1e6:.0f} us an instruction, {own.step_s * 1e6:.0f} us a step"
    )


def three_digits(value: float) -> float:
    """Round to what a measurement is good for."""
    return float(f"{value:.3g}")
