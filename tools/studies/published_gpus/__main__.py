"""What a forecast is worth for what it was not fitted on: cards, models and sources left out.

    python -m tools.studies.published_gpus --data DIR

Every row is forecast at the usual shares, as of a card that nobody measured ("card"); then one
factor for its card and precision, the median of rows of other models ("model") or of other sources
("source"), stands for the card's own shares: the card's rates are divided by it and the row is
forecast again, for a step that waits for its process is no slower on a slower card. Rules of
families of ops were fitted on all rows. The interval that a forecast says is calibrated here, and
its coverage is of rows that it was not calibrated on. It takes some minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import click

from tools.bench.published_gpus.__main__ import said_of
from tools.bench.published_gpus.forecasts import Said, forecast
from tools.bench.published_gpus.graphs import FOLDER, read_graphs
from tools.bench.published_gpus.rows import Row, data_folder, read_rows
from tools.bench.published_gpus.table import HEAD, line, lines

LOW, HIGH = 0.05, 0.95

Slowed = tuple[Row, float]
"""A row, and how much slower its card is taken to be than a usual one."""


@dataclass(frozen=True)
class Band:
    """Measured over forecast, from one quantile to another, and how many others lie within."""

    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        """Show it."""
        return f"{self.low:.2f} to {self.high:.2f}, {self.coverage:.0%} of what was left out"


def ratio(said: Said) -> float:
    """Return measured over forecast."""
    return said.row.step_s / said.step_s


def corrected(said: Sequence[Said], other: Callable[[Said, Said], bool]) -> list[Slowed]:
    """Slow each row's card by the median ratio of rows that may stand for it."""
    found: list[Slowed] = []
    for each in said:
        like = [
            ratio(one)
            for one in said
            if (one.row.card, one.row.precision) == (each.row.card, each.row.precision)
            and other(one, each)
        ]
        if like:
            found.append((each.row, median(like)))
    return found


def again(slowed: Sequence[Slowed]) -> list[Said]:
    """Forecast rows again, at the usual shares of a card that is so much slower."""
    keys = frozenset(row.key for row, _ in slowed)
    found: dict[Slowed, Said] = {}
    for path in sorted(FOLDER.glob("*.json.xz")):
        for key, graph in read_graphs(path, keys):
            for row, times in (one for one in slowed if one[0].key == key and one not in found):
                found[row, times] = forecast(row, graph, usual=True, slower=times)
    return [found[one] for one in slowed]


def after_rows(said: Sequence[Said], count: int = 20, seeds: int = 10) -> list[Slowed]:
    """Measure `count` rows of each card that has more, and forecast the rest by their median.

    `said` is at the usual shares, as of a card that nobody measured; each of `seeds` draws other
    rows. Rows of the row's own precision count, where there are any.
    """
    found: list[Slowed] = []
    for card in sorted({each.row.card for each in said}):
        own = [each for each in said if each.row.card == card]
        for seed in range(seeds if len(own) > count else 0):
            drawn = Random(seed).sample(own, len(own))
            found += [_by_rows(each, drawn[:count]) for each in drawn[count:]]
    return found


def _by_rows(each: Said, seen: Sequence[Said]) -> Slowed:
    like = [one for one in seen if one.row.precision == each.row.precision] or seen
    return each.row, median(map(ratio, like))


def other_model(one: Said, each: Said) -> bool:
    """Whether two rows are of unlike models."""
    return one.row.key.name != each.row.key.name


def other_source(one: Said, each: Said) -> bool:
    """Whether two rows are of unlike sources."""
    return one.row.source != each.row.source


def band(said: Sequence[Said]) -> Band:
    """Return an interval, and how many rows of models in one half it holds, by the other half."""
    names = sorted({each.row.key.name for each in said})
    held = total = 0
    for part in (0, 1):
        mine = {name for place, name in enumerate(names) if place % 2 == part}
        low, high = _ends([ratio(one) for one in said if one.row.key.name in mine])
        rest = [ratio(one) for one in said if one.row.key.name not in mine]
        held += sum(low <= value <= high for value in rest)
        total += len(rest)
    return Band(*_ends([ratio(one) for one in said]), held / total)


def _ends(ratios: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(ratios)
    last = len(ordered) - 1
    return ordered[round(LOW * last)], ordered[round(HIGH * last)]


def rows_or_end(given: Path | None) -> list[Row]:
    """Return the rows for a command; where there are none, say so and end it, as nothing is wrong.

    Raises:
        Exit: with code 0.
    """
    folder = data_folder(given)
    if folder is None:
        click.echo("no published rows here: give --data DIR; nothing is compared")
        raise click.exceptions.Exit(0)
    return read_rows(folder)[0]


@click.command()
@click.option("--data", type=click.Path(path_type=Path))
def main(data: Path | None) -> None:
    """Print errors of what is left out, by card, and the intervals."""
    rows = [row for row in rows_or_end(data) if row.parallelism != "PP"]
    usual = said_of(rows, usual=True)
    ways = {
        "card": usual,
        "model": again(corrected(usual, other_model)),
        "source": again(corrected(usual, other_source)),
        "card, but for 20 of its rows": again(after_rows(usual)),
    }
    for name, said in ways.items():
        click.echo(f"\nleft out: the {name}\n{HEAD}")
        click.echo("\n".join(map(str, lines(said, lambda s: s.row.card))))
        click.echo(f"{line('all', said)}\ninterval: {band(said)}")


if __name__ == "__main__":
    main()
