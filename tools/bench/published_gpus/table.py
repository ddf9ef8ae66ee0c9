"""Forecasts beside rows: mean, worst and rank, by source, card, model and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tools.bench.published_gpus.forecasts import Said


@dataclass(frozen=True)
class Line:
    """Errors of a group of rows; shares, not percent."""

    name: str
    rows: int
    mean: float
    worst: float
    bias: float
    spearman: float | None
    rule_mean: float

    def __str__(self) -> str:
        """Show a row of the table."""
        rank = "    -" if self.spearman is None else f"{self.spearman:5.3f}"
        return (
            f"{self.name:<34}{self.rows:>5} {self.mean:>8.1%} {self.worst:>8.1%} "
            f"{self.bias:>+8.1%} {rank}   {self.rule_mean:>8.1%}"
        )


HEAD = f"{'':<34}{'rows':>5} {'mean':>8} {'worst':>8} {'median':>8} {'rank':>5}   {'one-line':>8}"


def line(name: str, said: Sequence[Said]) -> Line:
    """Sum a group up."""
    errors = [abs(each.error) for each in said]
    rank = spearman([s.step_s for s in said], [s.row.step_s for s in said])
    return Line(
        name,
        len(said),
        fmean(errors),
        max(errors),
        median(each.error for each in said),
        rank,
        fmean(abs(each.rule_error) for each in said),
    )


def lines(said: Sequence[Said], by: Callable[[Said], str]) -> Iterator[Line]:
    """Yield a line for each group."""
    for name in sorted({by(each) for each in said}):
        yield line(name, [each for each in said if by(each) == name])


GROUPS: Sequence[tuple[str, Callable[[Said], str]]] = (
    ("source", lambda s: s.row.source),
    ("card", lambda s: s.row.card),
    ("precision", lambda s: f"{s.row.card} {s.row.precision}"),
    ("model", lambda s: f"{s.row.source} {s.row.key.name}"),
    ("task", lambda s: f"{s.row.source} {s.row.key.task} {s.row.key.layout}"),
)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the correlation of ranks; None for fewer than three."""
    if len(a) < 3:
        return None
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    over = sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    under = (sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y)) ** 0.5
    return over / under if under else None


def _ranks(values: Iterable[float]) -> list[float]:
    """Return each one's place; equal ones share theirs."""
    found = list(values)
    order = sorted(range(len(found)), key=found.__getitem__)
    ranks = [0.0] * len(found)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and found[order[end + 1]] == found[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks
