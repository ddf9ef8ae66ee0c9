"""The second scenario of the learned costs: regressions of few features, and a factor a family.

Features are clustered by their correlation (average linkage, 1 - |r|, cut where it is 0.3); of each
cluster the feature that is most correlated with the logarithm of time stands for it, and of these
the first 5 or 10 are what boosting sees. Chosen anew from what is seen, whatever is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeAlias

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from bigbrain_fx.costs.fit import MODELS, Row, has, seconds_of, work_of
from bigbrain_fx.costs.model import Floats, Phase, PlaceRates, expected_s, matrix, names

SIZES = (5, 10)
CUT = 0.3  # features within it are one cluster
AS_EXPECTED = 1  # times of a family that count as the middle of all

Forecaster: TypeAlias = Callable[[Sequence[Row], Sequence[Row], Phase], list[float]]


@dataclass(frozen=True)
class ChosenFeature:
    """A feature that stands for its cluster; `correlation` with log time, as it is signed."""

    column: int
    name: str
    correlation: float
    alike: int


def chosen(x: Floats, target: Floats, labels: Sequence[str], count: int) -> list[ChosenFeature]:
    """Return what stands for its cluster, the most correlated with the target first."""
    live = [i for i in range(x.shape[1]) if float(np.ptp(x[:, i])) > 0.0]
    between = np.corrcoef(x[:, live].T)
    apart = squareform(np.clip(1.0 - np.abs(between), 0.0, None), checks=False)
    cluster = fcluster(linkage(apart, "average"), CUT, "distance")
    with_target = [float(np.corrcoef(x[:, i], target)[0, 1]) for i in live]
    found = []
    for own in sorted(set(cluster)):
        members = [at for at, where in enumerate(cluster) if where == own]
        best = max(members, key=lambda at: abs(with_target[at]))
        name = labels[live[best]]
        found.append(ChosenFeature(live[best], name, with_target[best], len(members)))
    return sorted(found, key=lambda feature: -abs(feature.correlation))[:count]


def choice(rows: Sequence[Row], phase: Phase, count: int) -> list[ChosenFeature]:
    """Return the features that are chosen from all of these rows."""
    timed = [row for row in rows if has(row[1], phase)]
    families = _families(timed)
    x = _features(timed, families)
    return chosen(x, np.log2(_seconds(timed, phase)), names(families), count)


def few_features(
    seen: Sequence[Row], asked: Sequence[Row], phase: Phase, count: int, of_seconds: bool
) -> list[float]:
    """Forecast by boosting of so many features: of seconds, or of those over expected ones."""
    timed = [row for row in seen if has(row[1], phase)]
    columns = [feature.column for feature in choice(timed, phase, count)]
    families = _families(timed)
    ideal = np.ones(len(timed)) if of_seconds else _expected(timed, phase)
    target = np.log2(_seconds(timed, phase) / ideal)
    made = MODELS["boosting"](_features(timed, families)[:, columns], target)
    logs = made.predict(_features(asked, families)[:, columns])
    scale = np.ones(len(asked)) if of_seconds else _expected(asked, phase)
    return [float(second) for second in scale * np.exp2(logs)]


def family_factors(seen: Sequence[Row], asked: Sequence[Row], phase: Phase) -> list[float]:
    """Forecast by `analytical` times a factor a family; of a family unseen, the middle of all."""
    timed = [row for row in seen if has(row[1], phase)]
    logs = np.log2(_seconds(timed, phase) / _expected(timed, phase))
    middle = float(np.median(logs))
    own: dict[str, list[float]] = {}
    for (_, profile), log in zip(timed, logs, strict=True):
        own.setdefault(work_of(profile).family, []).append(float(log))
    factor = {
        name: 2.0 ** (middle + (median(some) - middle) * len(some) / (len(some) + AS_EXPECTED))
        for name, some in own.items()
    }
    usual = 2.0**middle
    return [
        expected_s(work_of(profile), machine)[phase] * factor.get(work_of(profile).family, usual)
        for machine, profile in asked
    ]


SCENARIO: Mapping[str, Forecaster] = {
    "5 features": partial(few_features, count=5, of_seconds=True),
    "10 features": partial(few_features, count=10, of_seconds=True),
    "10, over analytical": partial(few_features, count=10, of_seconds=False),
    "a factor a family": family_factors,
}


def _families(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(sorted({work_of(profile).family for _, profile in rows}))


def _features(rows: Sequence[Row], families: Sequence[str]) -> Floats:
    works = [work_of(profile) for _, profile in rows]
    return matrix(works, [PlaceRates.of(machine) for machine, _ in rows], families)


def _seconds(rows: Sequence[Row], phase: Phase) -> Floats:
    return np.array([seconds_of(profile, phase) for _, profile in rows])


def _expected(rows: Sequence[Row], phase: Phase) -> Floats:
    return np.array([expected_s(work_of(profile), machine)[phase] for machine, profile in rows])
