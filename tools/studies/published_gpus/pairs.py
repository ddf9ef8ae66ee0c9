"""How far the ratio of two forecasts of one model may be off: pairs of rows of one model and card.

    python -m tools.studies.published_gpus.pairs --data DIR

Two plans of one model share most of what a forecast gets wrong: the card's share, the kernels. So
what decides between them is not each one's interval but that of their ratio, which is narrower.
A pair is two rows of one source, model, card and precision, in another setting: micro-batch, how
many of them, how many GPUs, recompute. Groups count alike, however many rows they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from pathlib import Path

import click

from tools.bench.published_gpus.__main__ import said_of
from tools.bench.published_gpus.forecasts import Said
from tools.studies.published_gpus.__main__ import ratio, rows_or_end

_SHARES = (0.5, 0.67, 0.9)


@dataclass(frozen=True)
class Pair:
    """Two rows: their ratio as measured over that as forecast; `weight` is one over its group's."""

    one: Said
    other: Said
    weight: float

    @property
    def off(self) -> float:
        """How far the ratio is off, as a logarithm, either way."""
        return abs(log(ratio(self.one) / ratio(self.other)))


def pairs(said: Sequence[Said]) -> Iterator[Pair]:
    """Yield every pair of rows of one group."""
    groups: dict[object, list[Said]] = {}
    for each in said:
        row = each.row
        groups.setdefault((row.source, row.card, row.key, row.precision, row.fused), []).append(
            each
        )
    for group in groups.values():
        found = list(combinations(group, 2))
        yield from (Pair(one, other, 1 / len(found)) for one, other in found)


def within(found: Sequence[Pair], share: float) -> float:
    """Return the factor that a share of pairs is within, each group counted alike."""
    left = share * sum(pair.weight for pair in found)
    for pair in sorted(found, key=lambda p: p.off):
        left -= pair.weight
        if left <= 1e-12:
            return exp(pair.off)
    return exp(max(pair.off for pair in found))


KINDS: Sequence[tuple[str, Callable[[Pair], bool]]] = (
    ("all", lambda p: True),
    ("other micro-batch", lambda p: p.one.row.micro_batch != p.other.row.micro_batch),
    ("other number of GPUs", lambda p: p.one.row.gpus != p.other.row.gpus),
    ("pipelines", lambda p: "PP" in (p.one.row.parallelism, p.other.row.parallelism)),
    ("within a quarter of each other", lambda p: _near(p)),
)


def _near(pair: Pair) -> bool:
    speeds = [each.row.samples / each.row.step_s for each in (pair.one, pair.other)]
    return max(speeds) <= 1.25 * min(speeds)


@click.command()
@click.option("--data", type=click.Path(path_type=Path))
def main(data: Path | None) -> None:
    """Print, for each kind of pairs, within which factor half, two thirds, nine of ten are."""
    found = list(pairs(said_of(rows_or_end(data))))
    click.echo(f"{'':<32}{'pairs':>6}" + "".join(f"{share:>8.0%}" for share in _SHARES))
    for name, is_kind in KINDS:
        own = [pair for pair in found if is_kind(pair)]
        if own:
            shares = "".join(f"{within(own, share):8.3f}" for share in _SHARES)
            click.echo(f"{name:<32}{len(own):>6}{shares}")


if __name__ == "__main__":
    main()
