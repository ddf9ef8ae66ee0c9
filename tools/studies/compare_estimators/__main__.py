"""Analytical against learned op times, on what they have not seen: one table and one plot.

    python -m tools.studies.compare_estimators PROFILES.sqlite [--published PATH]
        --out results.md [--json]

PROFILES is what `bigbrain-fx profile` wrote, of several models. Each learned model is fitted
without a family of ops, without a model, without a fifth of the signatures, and (where more than
one was profiled) without a device, and judged on what was left out. PATH is a folder that holds
public per-layer profiles (`published_layers`): the same without a network, without a device. Errors
are of seconds. The plot is written beside the table.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import click

from bigbrain_fx.costs.fit import FOLDS, Row, fit, folds, is_measured, seconds_of, work_of
from bigbrain_fx.costs.model import PHASES, CostModel, Phase, expected_s, family
from bigbrain_fx.costs.profiles import ProfileStore
from bigbrain_fx.errors import BigBrainError, InputError
from tools.bench.published_gpus.table import spearman
from tools.studies.compare_estimators.feature_sets import SCENARIO, SIZES, ChosenFeature, choice
from tools.studies.compare_estimators.published_layers import constant_ratios, read_published

LEARNED: Mapping[str, tuple[str, bool]] = {
    "linear": ("linear", False),
    "SVM": ("svm", False),
    "random forest": ("random-forest", False),
    "boosting": ("boosting", False),
    "two-stage forest": ("random-forest", True),
}
OF_SECONDS: Mapping[str, str] = {
    "forest, of seconds": "random-forest",
    "boosting, of seconds": "boosting",
}
"""What is told seconds as such; all others, those over what `analytical` expects."""
METHODS = ("analytical", *LEARNED)
BESIDE = ("analytical", "boosting", *OF_SECONDS, *SCENARIO)
FEWEST_OF_A_FAMILY = 12  # signatures; of fewer an error says little

Part: TypeAlias = tuple[str, list[Row], list[Row]]  # what was left out, seen, unseen
Origins: TypeAlias = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Point:
    """One time: forecast by a method that did not see it, and measured.

    `held` is what the fit went without; `model` names are in the profile database.
    """

    split: str
    method: str
    held: str
    op: str
    phase: Phase
    forecast_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """|forecast / measured - 1|."""
        return abs(self.forecast_s / self.measured_s - 1.0)


@dataclass(frozen=True)
class Score:
    """How far off a method is, as shares of the measured seconds.

    `total` is of the summed time of what was left out at once, averaged: errors of single ops may
    cancel in it. `rank` is Spearman's of all of them.
    """

    points: int
    mape: float
    median: float
    total: float
    rank: float


# --------------------------------------------------------------------------- what is left out


def by_fifth(rows: Sequence[Row]) -> Iterator[Part]:
    """Leave out a fifth of the signatures at a time: new shapes of known ops."""
    fold = folds([profile.signature.key for _, profile in rows])
    yield from _parts(rows, [[str(own + 1)] for own in fold], map(str, range(1, FOLDS + 1)))


def by_family(rows: Sequence[Row]) -> Iterator[Part]:
    """Leave out a family of ops at a time, if it is not too small to judge."""
    labels = [[family(profile.signature.target)] for _, profile in rows]
    counts = Counter(name for (name,) in labels)
    large = sorted(name for name, count in counts.items() if count >= FEWEST_OF_A_FAMILY)
    yield from _parts(rows, labels, large)


def by_model(rows: Sequence[Row], origins: Origins) -> Iterator[Part]:
    """Leave out a model at a time: every op that it has, whoever else has it."""
    labels = [sorted(origins.get(profile.signature.key, ())) for _, profile in rows]
    yield from _parts(rows, labels, sorted({name for names in labels for name in names}))


def by_device(rows: Sequence[Row]) -> Iterator[Part]:
    """Leave out a device at a time; one processor under two names of dtypes is one device."""
    labels = [[machine.processor.partition(" (float")[0]] for machine, _ in rows]
    names = sorted({name for (name,) in labels})
    yield from _parts(rows, labels, names if len(names) > 1 else ())


def _parts(
    rows: Sequence[Row], labels: Sequence[Sequence[str]], names: Iterable[str]
) -> Iterator[Part]:
    for name in names:
        marked = [(row, name in own) for row, own in zip(rows, labels, strict=True)]
        unseen = [row for row, is_out in marked if is_out]
        if unseen:
            yield name, [row for row, is_out in marked if not is_out], unseen


# --------------------------------------------------------------------------- forecasts


def compare(split: str, parts: Iterable[Part], phases: Sequence[Phase] = PHASES) -> Iterator[Point]:
    """Yield every method's forecast of every time that was left out.

    All methods are judged on the same times: a phase that the learned ones cannot be fitted to
    without the part left out is judged for none.
    """
    for held, seen, unseen in parts:
        click.echo(f"{split}: without {held}", err=True)
        try:
            models = {name: fit(seen, kind, two) for name, (kind, two) in LEARNED.items()}
            models |= {name: fit(seen, kind, of_seconds=True) for name, kind in OF_SECONDS.items()}
        except InputError:
            click.echo("  too little is left to fit to", err=True)
            continue
        for phase in phases:
            timed = [row for row in unseen if is_measured(row[1], phase)]
            if not timed or phase not in models["linear"].phases:
                continue
            forecasts = {"analytical": [_analytical(row, phase) for row in timed]}
            for name, model in models.items():
                forecasts[name] = _learned(model, timed, phase)
            for name, scenario in SCENARIO.items():
                forecasts[name] = scenario(seen, timed, phase)
            for name, found in forecasts.items():
                for (_, profile), forecast_s in zip(timed, found, strict=True):
                    measured_s, op = seconds_of(profile, phase), family(profile.signature.target)
                    yield Point(split, name, held, op, phase, forecast_s, measured_s)


def _analytical(row: Row, phase: Phase) -> float:
    machine, profile = row
    return expected_s(work_of(profile), machine)[phase]


def _learned(model: CostModel, rows: Sequence[Row], phase: Phase) -> list[float]:
    found = [0.0] * len(rows)
    for where in dict.fromkeys(machine for machine, _ in rows):
        places = [i for i, (machine, _) in enumerate(rows) if machine == where]
        forecasts = model.seconds(phase, [work_of(rows[i][1]) for i in places], where)
        for i, forecast_s in zip(places, forecasts, strict=True):
            found[i] = float(forecast_s)
    return found


def score(points: Sequence[Point]) -> Score:
    """Sum up the points of one method."""
    errors = [point.error for point in points]
    held: dict[str, list[Point]] = {}
    for point in points:
        held.setdefault(point.held, []).append(point)
    totals = [
        abs(sum(p.forecast_s for p in some) / sum(p.measured_s for p in some) - 1.0)
        for some in held.values()
    ]
    return Score(
        len(errors),
        statistics.fmean(errors),
        statistics.median(errors),
        statistics.fmean(totals),
        spearman([p.forecast_s for p in points], [p.measured_s for p in points]) or 0.0,
    )


@dataclass(frozen=True)
class Comparison:
    """Everything that was compared, and on what.

    `devices` are said in words; `spread` is the middle op's, as in `OpProfile`; `ratios` are the
    constant factors that tell that a published CPU is no device of its own. `features` are the ten
    that stand for their clusters, by phase, where nothing is left out.
    """

    points: tuple[Point, ...]
    signatures: int
    models: tuple[str, ...]
    devices: tuple[str, ...]
    spread: float
    published: tuple[str, ...]
    ratios: tuple[float | None, ...]
    features: Mapping[Phase, Sequence[ChosenFeature]]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of what was left out, in order."""
        return tuple(dict.fromkeys(point.split for point in self.points))

    def of(self, split: str, method: str) -> list[Point]:
        """Return the points of one cell of the table."""
        return [p for p in self.points if (p.split, p.method) == (split, method)]


def compare_all(profiles: Path, published: Path | None) -> Comparison:
    """Make every comparison that the data allows.

    Raises:
        InputError: no database, or one with too little in it.
    """
    store = ProfileStore(profiles, read_only=True)
    rows, origins = store.rows(), store.origins()
    fit(rows, "linear")  # refuses too few at once
    points = [
        *compare("a fifth of the shapes", by_fifth(rows)),
        *compare("a family of ops", by_family(rows)),
        *compare("a model", by_model(rows, origins)),
        *compare("a device", by_device(rows)),
    ]
    public = read_published(published) if published else None
    if public and public.rows:
        layers = [row for row in public.rows if row[1].signature.key in public.networks]
        networks = by_model(layers, public.networks)
        points += compare("a network (published)", networks, ("forward",))
        points += compare("a device (published)", by_device(public.rows), ("forward",))
    ratios = constant_ratios(published).values() if published else ()
    return Comparison(
        points=tuple(points),
        signatures=len({profile.signature.key for _, profile in rows}),
        models=tuple(sorted({name for names in origins.values() for name in names})),
        devices=tuple(sorted({machine.key for machine, _ in rows})),
        spread=statistics.median(profile.spread for _, profile in rows),
        published=tuple(sorted({m.processor for m, _ in public.rows})) if public else (),
        ratios=tuple(sorted(set(ratios), key=str)),
        features={phase: choice(rows, phase, max(SIZES)) for phase in PHASES},
    )


# --------------------------------------------------------------------------- the command


@click.command()
@click.argument("profiles", type=click.Path(path_type=Path))
@click.option("--published", type=click.Path(path_type=Path), help="Folder of public profiles.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The .md to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one object a cell, then a summary.")
def main(profiles: Path, published: Path | None, out: Path, as_json: bool) -> None:
    """Compare estimators on PROFILES; write a table and a plot."""
    from tools.compare_report import markdown, write_plot

    try:
        found = compare_all(profiles, published)
    except BigBrainError as error:
        raise click.ClickException(str(error)) from error
    plot = out.with_suffix(".svg")
    write_plot(found, plot)
    out.write_text(markdown(found, plot.name, published is not None))
    for split in found.splits:
        for method in dict.fromkeys((*METHODS, *BESIDE)):
            facts = vars(score(found.of(split, method)))
            if as_json:
                click.echo(json.dumps({"split": split, "method": method, **facts}))
    if as_json:
        click.echo(json.dumps({"summary": {"points": len(found.points), "wrote": str(out)}}))
    else:
        click.echo(f"wrote {out} and {plot}")


if __name__ == "__main__":
    main()
