"""A comparison of estimators as text and as a plot. Only this file knows matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.studies.compare_estimators.__main__ import (
    BESIDE,
    FEWEST_OF_A_FAMILY,
    METHODS,
    Comparison,
    Point,
    score,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tools.feature_sets import ChosenFeature

PLOTTED = "a model"


def markdown(found: Comparison, plot: str, with_published: bool) -> str:
    """Return the page: what was compared, the table, the families, the plot."""
    return "\n".join(
        [
            *_head(found),
            *_table(found, METHODS),
            "",
            *_second(found),
            *_by_phase(found),
            *_families(found),
            *(_published(found) if with_published else []),
            f"## Forecast against measured\n\n![forecast against measured]({plot})\n",
            f"Every time of the row '{PLOTTED}', by every method; on the line both are equal,",
            "dotted they differ by two. Ops that several models have are there several times.\n",
        ]
    )


def _head(found: Comparison) -> list[str]:
    return [
        "# Op times: analytical against learned\n",
        "Written by `python -m tools.studies.compare_estimators PROFILES.sqlite --published PATH "
        "--out results.md`; do not edit.\n",
        f"Profiled with `bigbrain-fx profile`: {found.signatures} distinct ops of "
        f"{', '.join(found.models)}, on",
        *(f"- {name}" for name in found.devices),
        "",
        f"The samples of one op spread by {_percent(found.spread)} % (interquartile range over "
        "median; the middle op): what is called measured is a mean of all of them.",
        "",
        "Errors are |forecast / measured − 1| of seconds, of times that the fit did not see: the",
        "row says what it went without. **MAPE / median**, in %. `total` is the error of the "
        "summed",
        "time of what was left out at once (all ops of a model, say), averaged over what was left",
        f"out. Families of fewer than {FEWEST_OF_A_FAMILY} signatures are not left out; times "
        "under",
        "1 µs are not judged, they are the clock's. The numbers in `estimators/op_rules.py` were "
        "fitted",
        "to such ops on a CPU of this kind, these among them: what `analytical` has here is the "
        "error",
        "of a fit of some three numbers a family, left out or not, and what others correct.\n",
    ]


def _table(found: Comparison, methods: Sequence[str]) -> list[str]:
    lines = [
        f"| without | times | {' | '.join(methods)} |",
        f"|---|---:|{'---:|' * len(methods)}",
    ]
    for split in found.splits:
        scores = [score(found.of(split, method)) for method in methods]
        cells = [f"{_percent(s.mape)} / {_percent(s.median)}" for s in scores]
        lines.append(f"| {split} | {scores[0].points} | {' | '.join(cells)} |")
        lines.append(f"| … total | | {' | '.join(_percent(s.total) for s in scores)} |")
        lines.append(f"| … Spearman | | {' | '.join(f'{s.rank:.3f}' for s in scores)} |")
    return lines


def _second(found: Comparison) -> list[str]:
    """Say what the fewest features do, beside the shipped way and the one before it."""
    return [
        "## Of seconds, of few features, of families alone\n",
        "`boosting` is what `fit` does unless told otherwise: a regression of measured seconds",
        "over those that `analytical` expects of the op alone. *Of seconds* is what it regressed",
        "before (`random-forest` by default). Of the features, those that go together are one",
        "cluster (average linkage of 1 − |r|, cut at 0.3), for which the one most correlated with",
        "log time stands; the first 5 or 10 of these are what boosting sees, of seconds or over",
        "`analytical`. A *factor a family* is the family's middle of measured over `analytical`.\n",
        *_table(found, BESIDE),
        "",
        "Of all ops, these stand for their clusters (correlation with log time; features in the",
        "cluster, where it has several):\n",
        *(
            f"- {phase.replace('_', ' ')}: {', '.join(map(_feature, some))}"
            for phase, some in found.features.items()
        ),
        "",
    ]


def _feature(one: ChosenFeature) -> str:
    several = f", of {one.alike}" if one.alike > 1 else ""
    return f"{one.name} ({one.correlation:.2f}{several})"


def _by_phase(found: Comparison) -> list[str]:
    lines = [
        f"## Forward and backward apart, without {PLOTTED}\n",
        f"| phase | times | {' | '.join(METHODS)} |",
        f"|---|---:|{'---:|' * len(METHODS)}",
    ]
    for phase in dict.fromkeys(point.phase for point in found.points):
        some = [[p for p in found.of(PLOTTED, m) if p.phase == phase] for m in METHODS]
        if some[0]:
            lines.append(_row(phase.replace("_", " "), some))
    return [*lines, ""]


def _families(found: Comparison) -> list[str]:
    """Show the families that take most of the time, each without itself."""
    split = "a family of ops"
    weight: dict[str, float] = {}
    for point in found.of(split, METHODS[0]):
        weight[point.op] = weight.get(point.op, 0.0) + point.measured_s
    lines = [
        "## Families that were left out, dearest first\n",
        f"| without | times | {' | '.join(METHODS)} |",
        f"|---|---:|{'---:|' * len(METHODS)}",
    ]
    dearest = sorted(weight, key=lambda op: -weight[op])[:12]
    of_method = [found.of(split, method) for method in METHODS]
    rows = [_row(op, [[p for p in some if p.op == op] for some in of_method]) for op in dearest]
    return [*lines, *rows, ""]


def _row(name: str, some: Iterable[list[Point]]) -> str:
    scores = [score(points) for points in some]
    cells = [f"{_percent(s.mape)} / {_percent(s.median)}" for s in scores]
    return f"| {name} | {scores[0].points} | {' | '.join(cells)} |"


def _published(found: Comparison) -> list[str]:
    if not found.published:
        return ["No published profiles were found below PATH.\n"]
    ratios = ", ".join("varies" if r is None else f"{r:g}" for r in found.ratios)
    return [
        "## The published profiles\n",
        f"Devices: {'; '.join(found.published)}. PipeDream's layers are of one GPU, which the",
        "files do not name; its rates are taken from the profile itself (95th percentile of rates,",
        "5th of times), as are the V100's of products. Forward only: PipeDream's backward times "
        "are",
        "charged to other layers than they belong to. Alpa's V100 has square products only. So a",
        "device left out means convolutional and recurrent layers forecast from square products,",
        "and the reverse: hard, and all that these files allow. Piper's times are PipeDream's. In",
        "the dnn-partitioning files the CPU's time over the accelerator's is one constant for "
        "every",
        f"node of a file ({ratios}): no second device.\n",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"


def write_plot(found: Comparison, path: Path) -> None:
    """Draw all points, a panel for each method; points are pixels, so that the file is small."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    split = PLOTTED if found.of(PLOTTED, METHODS[0]) else found.splits[0]
    with mpl.rc_context({"svg.hashsalt": "bigbrain-fx", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8, 5.2), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True, sharey=True)
        for panel, method in zip(panels.flat, METHODS, strict=False):
            _panel(panel, method, found.of(split, method))
        figure.supxlabel("measured, seconds")
        figure.supylabel("forecast, seconds")
        figure.savefig(path, format="svg", dpi=144, metadata={"Date": None})


def _panel(panel: Axes, method: str, points: list[Point]) -> None:
    measured = [point.measured_s for point in points]
    ends = [min(measured), max(measured)]
    for factor, style in ((1.0, "-"), (2.0, ":"), (0.5, ":")):
        panel.plot(
            ends, [factor * end for end in ends], style, color="black", linewidth=0.8, zorder=3
        )
    for phase, color in (("forward", "C0"), ("backward_input", "C1"), ("backward_weight", "C2")):
        some = [point for point in points if point.phase == phase]
        panel.scatter(
            [point.measured_s for point in some],
            [point.forecast_s for point in some],
            s=3,
            color=color,
            alpha=0.5,
            linewidths=0,
            label=phase.replace("_", " "),
            rasterized=True,
        )
    found = score(points)
    panel.set(xscale="log", yscale="log")
    panel.minorticks_off()
    panel.set_title(f"{method}\nMAPE {_percent(found.mape)} %, median {_percent(found.median)} %")
    if method == METHODS[0]:
        panel.legend(frameon=False, markerscale=3)
