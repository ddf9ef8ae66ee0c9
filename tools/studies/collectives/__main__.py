"""Alpha-beta fits of measured collectives, and where two parameters are not enough.

    python -m tools.studies.collectives --data PATH [--pieces 3] [--json]
        [--write results.md]

PATH (or BIGBRAIN_PUBLISHED_DATA, or the folder that holds the file) is the text of Alpa's database
of collective costs, p3.16xlarge: all-gather, all-reduce, all-to-all and reduce-scatter on up to 4
hosts of 8 V100, 248 series of 32 or 33 sizes. It is read, never copied.

Not every point there is a measured message:
- Fewer elements than ranks (all-to-all: than their square) are none each: nothing is sent.
- Alpa's `make_monotonic` has been at work: where a larger message reached less bandwidth than a
  smaller one, its time was replaced by its size over the smaller one's bandwidth. Such a point is a
  lower bound. It shows: times are as sizes, to the last digit.
Fits use, and errors are of, the other points; the last column has all of them.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bigbrain_fx.errors import BigBrainError, InputError
from tools.studies.collectives.alpha_beta import (
    AlphaBeta,
    Pieces,
    fit_alpha_beta,
    fit_pieces,
    relative_errors,
)

FILE = "collectives_p3.16xlarge_alpa.txt"
VARIABLE = "BIGBRAIN_PUBLISHED_DATA"
DTYPE_BYTES = {"f16": 2, "f32": 4}
FEWEST_MEASURED = 8  # of a series: enough to fit two pieces on half of them

_MESH = re.compile(r"Key: \('[^']*', \((\d+), (\d+)\)\)")
_KIND = re.compile(r"(\w+)_cost_dict:")
_SERIES = re.compile(r"\((\(\(.*\),?\)), '(f16|f32)'\): \[(.*)\]")
_POINT = re.compile(r"\((\d+), ([^()]+)\)")


@dataclass(frozen=True)
class Topology:
    """Who talks to whom: `groups` groups of `ranks` devices, each over `hosts` hosts of a mesh."""

    mesh: tuple[int, int]
    groups: int
    ranks: int
    hosts: int
    stride: int

    def __str__(self) -> str:
        shape = f"{self.mesh[0]}x{self.mesh[1]}: {self.groups} x {self.ranks}"
        if self.ranks == 1:
            return f"{shape} (alone)"
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{shape}, {where}, stride {self.stride}"


@dataclass(frozen=True)
class Series:
    """The measured times of one collective.

    `sizes_bytes` and `seconds` are all points, in order of size; `is_measured` says which of them
    are measurements.
    """

    collective: str
    topology: Topology
    dtype: str
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    is_measured: tuple[bool, ...]

    @property
    def measured(self) -> tuple[list[int], list[float]]:
        """Sizes and seconds of the measurements."""
        kept = [i for i, is_measured in enumerate(self.is_measured) if is_measured]
        return [self.sizes_bytes[i] for i in kept], [self.seconds[i] for i in kept]


Fit = Callable[[Sequence[float], Sequence[float]], AlphaBeta | Pieces]


@dataclass(frozen=True)
class Fitted:
    """One series with its fits.

    Each of the errors is a list of |forecast / measured - 1|: of `line` on the points it was fitted
    to; of a line and of pieces on points that they were not fitted to (every other one is left
    out, in turn); of a line fitted to all points on all points.
    """

    series: Series
    line: AlphaBeta
    errors: list[float]
    unseen: list[float]
    pieces_unseen: list[float]
    all_errors: list[float]


def read_series(text: str) -> Iterator[Series]:
    """Yield every collective's series of the text of Alpa's database; series of inf too.

    Raises:
        InputError: a line of numbers is not as expected.
    """
    mesh, kind = (0, 0), ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _MESH.match(line):
            mesh = int(found[1]), int(found[2])
        elif found := _KIND.match(line):
            kind = found[1]
        elif line.startswith("  (((") and kind:
            yield _series(kind, mesh, line.strip(), number)


def _series(kind: str, mesh: tuple[int, int], line: str, number: int) -> Series:
    found = _SERIES.fullmatch(line)
    if found is None:
        raise InputError("expected ((groups), dtype): [(size, seconds), ...]", at=f"line {number}")
    points = [(int(n), float(s)) for n, s in _POINT.findall(found[3])]
    elements, seconds = zip(*points, strict=True)
    topology = _topology(mesh, found[1])
    return Series(
        collective=kind.replace("_", "-"),
        topology=topology,
        dtype=found[2],
        sizes_bytes=tuple(n * DTYPE_BYTES[found[2]] for n in elements),
        seconds=seconds,
        is_measured=tuple(
            is_own and count >= _fewest_sent(kind, topology.ranks)
            for count, is_own in zip(elements, _unmoved(elements, seconds), strict=True)
        ),
    )


def _topology(mesh: tuple[int, int], text: str) -> Topology:
    groups = [
        [int(rank) for rank in re.findall(r"\d+", group)]
        for group in re.findall(r"\(([\d, ]+)\)", text)
    ]
    first = groups[0]
    stride = first[1] - first[0] if len(first) > 1 else 0
    hosts = len({rank // mesh[1] for rank in first})
    return Topology(mesh, len(groups), len(first), hosts, stride)


def _fewest_sent(kind: str, ranks: int) -> int:
    """Return the fewest elements of which every rank sends one."""
    if ranks == 1 or kind == "all_reduce":
        return 1
    return ranks**2 if kind == "all_to_all" else ranks


def _unmoved(elements: Sequence[int], seconds: Sequence[float]) -> list[bool]:
    """Say which times are as they were measured; see the top of the file."""
    found = [math.isfinite(seconds[0])]
    for i in range(1, len(seconds)):
        moved = elements[i - 1] > 0 and math.isclose(
            seconds[i] * elements[i - 1], seconds[i - 1] * elements[i], rel_tol=1e-9
        )
        found.append(math.isfinite(seconds[i]) and not moved)
    return found


def fit_series(series: Series, pieces: int) -> Fitted:
    """Fit one series: a line, pieces, and both on points that they have not seen."""
    sizes, seconds = series.measured

    def in_pieces(n_bytes: Sequence[float], taken_s: Sequence[float]) -> Pieces:
        return fit_pieces(n_bytes, taken_s, pieces)

    line = fit_alpha_beta(sizes, seconds)
    of_all = fit_alpha_beta(series.sizes_bytes, series.seconds)
    return Fitted(
        series,
        line,
        relative_errors(line, sizes, seconds),
        _unseen(fit_alpha_beta, sizes, seconds),
        _unseen(in_pieces, sizes, seconds),
        relative_errors(of_all, series.sizes_bytes, series.seconds),
    )


def _unseen(fit: Fit, sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the error of each point by the fit of every other point; in order of size."""
    found = [0.0] * len(sizes)
    for turn in (0, 1):
        model = fit(sizes[turn::2], seconds[turn::2])
        errors = relative_errors(model, sizes[1 - turn :: 2], seconds[1 - turn :: 2])
        found[1 - turn :: 2] = errors
    return found


def summary(fits: Sequence[Fitted]) -> dict[str, float]:
    """Return counts and errors of some series, errors as shares."""
    errors = [error for fit in fits for error in fit.errors]
    return {
        "series": len(fits),
        "points": sum(len(fit.series.seconds) for fit in fits),
        "measured": len(errors),
        "mape": statistics.fmean(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
        "mape_unseen": _mean(fit.unseen for fit in fits),
        "mape_pieces_unseen": _mean(fit.pieces_unseen for fit in fits),
        "mape_all_points": _mean(fit.all_errors for fit in fits),
    }


def _mean(errors: Iterable[list[float]]) -> float:
    return statistics.fmean(error for some in errors for error in some)


def by(fits: Sequence[Fitted], key: Callable[[Series], str]) -> dict[str, list[Fitted]]:
    """Group fits, in the order of their first."""
    found: dict[str, list[Fitted]] = {}
    for fit in fits:
        found.setdefault(key(fit.series), []).append(fit)
    return found


SIZE_CLASSES = (("up to 1 KiB", 2**10), ("64 KiB", 2**16), ("1 MiB", 2**20), ("64 MiB", 2**26))


def by_size(fits: Sequence[Fitted]) -> dict[str, dict[str, float]]:
    """Return the errors of a line and of pieces, on unseen points, for each class of sizes."""
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in SIZE_CLASSES}
    lines["more"] = []
    for fit in fits:
        sizes, _ = fit.series.measured
        for nbytes, one, many in zip(sizes, fit.unseen, fit.pieces_unseen, strict=True):
            name = next((name for name, most in SIZE_CLASSES if nbytes <= most), "more")
            lines[name].append((one, many))
    return {
        name: {
            "measured": len(pairs),
            "mape_unseen": statistics.fmean(one for one, _ in pairs),
            "mape_pieces_unseen": statistics.fmean(many for _, many in pairs),
        }
        for name, pairs in lines.items()
        if pairs
    }


def located(data: Path | None) -> Path | None:
    """Return the file, given itself or its folder; None where there is none."""
    if data is None:
        return None
    path = data / FILE if data.is_dir() else data
    return path if path.is_file() else None


@click.command()
@click.option("--data", type=click.Path(path_type=Path), envvar=VARIABLE)
@click.option("--pieces", default=3, show_default=True, help="Most pieces of a piecewise fit.")
@click.option("--json", "as_json", is_flag=True, help="One line per series, then one summary.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the tables as a page.")
def main(data: Path | None, pieces: int, as_json: bool, write: Path | None) -> None:
    """Print errors of alpha-beta fits per topology, per collective and per size of message."""
    path = located(data)
    if path is None:
        click.echo(f"skipped: no {FILE}; give --data PATH or set {VARIABLE}", err=True)
        return
    try:
        found = list(read_series(path.read_text()))
    except BigBrainError as error:
        raise click.ClickException(str(error)) from error
    usable = [series for series in found if sum(series.is_measured) >= FEWEST_MEASURED]
    fits = [fit_series(series, pieces) for series in usable]
    if write is not None:
        write.write_text(PAGE.format(tables="\n".join(tables(found, fits))))
    if as_json:
        _print_json(found, fits)
    else:
        click.echo("\n".join(tables(found, fits)))


def _print_json(found: Sequence[Series], fits: Sequence[Fitted]) -> None:
    for fit in fits:
        row = {
            "collective": fit.series.collective,
            "topology": str(fit.series.topology),
            "dtype": fit.series.dtype,
            "latency_s": fit.line.latency_s,
            "bytes_per_s": fit.line.link.bytes_per_s if fit.line.s_per_byte else None,
            **summary([fit]),
        }
        click.echo(json.dumps(row))
    total = {
        "read_series": len(found),
        "read_points": sum(len(series.seconds) for series in found),
        **summary(fits),
        "by_size": by_size(fits),
        "by_collective": {
            name: summary(some) for name, some in by(fits, lambda s: s.collective).items()
        },
    }
    click.echo(json.dumps({"summary": total}))


PAGE = """# Alpha-beta fits of published collectives

Written by `python -m tools.studies.collectives --data PATH --write
tools/studies/collectives`; do not edit.
The measurements are Alpa's (p3.16xlarge, hosts of 8 V100). A point that `make_monotonic` moved,
or of
fewer elements than ranks, is not a measured message; the last column has all points.

```
{tables}
```
"""

_HEAD = "points  measured    MAPE  median   worst  unseen  pieces  all points"


def tables(found: Sequence[Series], fits: Sequence[Fitted]) -> Iterator[str]:
    """Yield the lines of the tables: errors per topology, per collective, per size."""
    points = sum(len(series.seconds) for series in found)
    yield f"read {len(found)} series, {points} points; {len(found) - len(fits)} without times"
    yield "errors are |forecast / measured - 1| in %"
    yield "unseen and pieces: a line and pieces on points that they were not fitted to"
    for title, key in (
        ("mesh: groups x ranks", lambda s: str(s.topology)),
        ("collective", lambda s: s.collective),
        ("all", lambda s: "all"),
    ):
        yield f"\n{title:<36}{_HEAD}"
        for name, some in by(fits, key).items():
            yield f"{name:<36}{_row(summary(some))}"
    yield f"\n{'size of the message':<36}measured  unseen  pieces"
    for name, row in by_size(fits).items():
        shown = f"{100 * row['mape_unseen']:>8.1f}{100 * row['mape_pieces_unseen']:>8.1f}"
        yield f"{name:<36}{row['measured']:>8}{shown}"


def _row(row: dict[str, float]) -> str:
    shares = ("mape", "median", "worst", "mape_unseen", "mape_pieces_unseen", "mape_all_points")
    return f"{row['points']:>6}{row['measured']:>10}" + "".join(
        f"{100 * row[name]:>{12 if name.endswith('points') else 8}.1f}" for name in shares
    )


if __name__ == "__main__":
    main()
