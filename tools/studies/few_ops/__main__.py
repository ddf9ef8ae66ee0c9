"""What a few ops measured on a new device are worth, of models that nobody profiled there.

    python -m tools.studies.few_ops BASE.sqlite NEW.sqlite... --out results.md

BASE and each NEW are what `bigbrain-fx profile` wrote of the same models, on two devices. A model
is left out of both; a base is fitted to the rest of BASE and corrected (`costs.correct`) by some
ops of the rest of NEW; the model's own ops on the new device are forecast. The ops are chosen
before anything is measured (`telling`), or drawn, or those of `profile` without a model, where NEW
has them. The published GPUs (`published_gpus.kernels`) are
taken in turn for the new device: a base of the kernels of the seven others, ten draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from random import Random
from statistics import fmean, median

import click
import numpy as np

from bigbrain_fx.costs.correct import correction, offsets
from bigbrain_fx.costs.fit import DEFAULT, Row, fit, has, is_measured, seconds_of, work_of
from bigbrain_fx.costs.model import PHASES, CostModel, expected_s
from bigbrain_fx.costs.profiles import Machine, OpProfile, ProfileStore, signature
from estimators.cuda_residuals import call_of
from tools.bench.published_gpus.table import spearman
from tools.studies.compare_estimators.__main__ import Origins
from tools.studies.published_gpus.kernels import TimedKernel, drawn, nobodys, timed_kernels

COUNTS = (0, 5, 10, 20, 40)
CARD_COUNTS = (0, 5, 10, 20)
PROBE = "twenty_ops.TwentyOps"  # what `profile` measures where no model is named
ASKED = "base, `profile` without a model"
DRAWS = 3
CARD_DRAWS = 10
LEAST_S = 2e-5  # an op that is expected to take less says nothing of others


@dataclass(frozen=True)
class Judged:
    """One time of what was left out."""

    held: str
    forecast_s: float
    measured_s: float


@dataclass(frozen=True)
class Curve:
    """Errors of one method on one device by how many ops were measured."""

    device: str
    method: str
    judged: Mapping[int, Sequence[Judged]]


# --------------------------------------------------------------------------- which ops


def telling(rows: Sequence[Row], count: int) -> list[Row]:
    """Choose the ops that say most of all, one after the other, before anything is measured.

    An op says half of what there is to know of another of its family, all of one that is expected
    to take as long; what is expected to take long counts more, as its logarithm. The greedy
    choice of facilities: Nemhauser, Wolsey and Fisher, Mathematical Programming 14 (1978).
    """
    pool = [row for row in rows if _expected_s(row) >= LEAST_S]
    if not pool:
        return []
    expected = np.array([_expected_s(row) for row in pool])
    families = np.array([work_of(profile).family for _, profile in pool])
    apart = np.abs(np.log2(expected)[:, None] - np.log2(expected)[None, :])
    says = (families[:, None] == families[None, :]) * (0.5 + 0.5 * np.exp(-apart / 2))
    known, found = np.zeros(len(pool)), list[int]()
    for _ in range(min(count, len(pool))):
        gain = (np.maximum(says, known) - known) @ np.log2(expected / LEAST_S + 1.0)
        gain[found] = -1.0
        found.append(int(gain.argmax()))
        known = np.maximum(known, says[found[-1]])
    return [pool[at] for at in found]


def _expected_s(row: Row) -> float:
    machine, profile = row
    said = expected_s(work_of(profile), machine)
    return sum(said[phase] for phase in PHASES if has(profile, phase))


# --------------------------------------------------------------------------- models left out


def curves(base: Path, new: Path) -> Iterator[Curve]:
    """Yield the curves of a new device."""
    old_rows, old_origins = _read(base)
    new_rows, new_origins = _read(new)
    probes = sum(PROBE in _models(row, new_origins) for row in new_rows)
    found: dict[str, dict[int, list[Judged]]] = {}
    for held in sorted({name for names in old_origins.values() for name in names}):
        known = fit(_without(old_rows, old_origins, held), DEFAULT)
        pool = _without(new_rows, new_origins, held)
        asked = [row for row in new_rows if held in _models(row, new_origins)]
        probe = [row for row in pool if PROBE in _models(row, new_origins)]
        others = [row for row in pool if _models(row, new_origins) != {PROBE}]
        for method, count, model in _corrected(known, others, probe):
            own = found.setdefault(method, {}).setdefault(probes if method == ASKED else count, [])
            own += _judged(model, asked, held)
    for method, by_count in found.items():
        yield Curve(new.stem, method, by_count)


def _read(path: Path) -> tuple[Sequence[Row], Origins]:
    store = ProfileStore(path, read_only=True)
    return store.rows(), store.origins()


def _without(rows: Sequence[Row], origins: Origins, held: str) -> list[Row]:
    return [row for row in rows if held not in _models(row, origins)]


def _models(row: Row, origins: Origins) -> frozenset[str]:
    return origins.get(row[1].signature.key, frozenset())


def _corrected(
    known: CostModel, pool: Sequence[Row], probe: Sequence[Row]
) -> Iterator[tuple[str, int, CostModel | None]]:
    yield "analytical", 0, None
    if probe:
        yield ASKED, len(probe), _by(known, probe)
    for count in COUNTS:
        yield "base, ops chosen", count, _by(known, telling(pool, count))
        for seed in range(DRAWS if count else 1):
            some = Random(seed).sample(list(pool), count)
            yield "base, ops drawn", count, _by(known, some)


def _by(known: CostModel, some: Sequence[Row]) -> CostModel:
    found = offsets(known, some)
    return replace(known, correction=correction(found)) if found else known


def _judged(model: CostModel | None, asked: Sequence[Row], held: str) -> Iterator[Judged]:
    for phase in PHASES if model is None else model.phases:
        timed = [row for row in asked if is_measured(row[1], phase)]
        for machine in dict.fromkeys(machine for machine, _ in timed):
            own = [profile for where, profile in timed if where == machine]
            works = [work_of(profile) for profile in own]
            if model is None:
                said = [expected_s(work, machine)[phase] for work in works]
            else:
                said = model.seconds(phase, works, machine).tolist()
            for profile, forecast_s in zip(own, said, strict=True):
                yield Judged(held, forecast_s, seconds_of(profile, phase))


# --------------------------------------------------------------------------- cards left out


def card_curves() -> Iterator[Curve]:
    """Yield the mean over published cards, each taken for new: FP32, forward."""
    timed = timed_kernels()
    rows = {each: _row(each) for each in timed}
    found: dict[str, dict[int, list[Judged]]] = {}
    for card in sorted({each.card for each in timed}):
        own = [each for each in timed if each.card == card]
        known = fit([row for each, row in rows.items() if each.card != card], DEFAULT)
        for count in CARD_COUNTS:
            for seed in range(CARD_DRAWS if count else 1):
                seen, others = drawn(own, count, seed)
                model = _by(known, [rows[each] for each in seen])
                asked = [rows[each] for each in others]
                for method, judge in (("analytical", None), ("base", model)):
                    if count and judge is None:
                        continue
                    place = found.setdefault(method, {}).setdefault(count, [])
                    place += _judged(judge, asked, card)
    for method, by_count in found.items():
        yield Curve("published cards", method, by_count)


def _row(timed: TimedKernel) -> Row:
    """Write a published kernel as a profile."""
    call, device = call_of(timed.kernel), nobodys(timed.card)
    op = call.op
    signed = signature(call.scope.graph, op)
    rates = (device.flops_per_s, device.memory_bytes_per_s, device.launch_s)
    machine = Machine("cuda", timed.card, "unknown", 1, *rates)
    moved = {"reads_bytes": int(op.reads_bytes), "writes_bytes": int(op.writes_bytes)}
    return machine, OpProfile(signed, timed.took_s, flops=int(op.flops), **moved)


# --------------------------------------------------------------------------- the page


def line(curve: Curve, count: int) -> str:
    """Return median and mean error, the error of a model's sum, and Spearman's."""
    some = curve.judged[count]
    errors = [abs(each.forecast_s / each.measured_s - 1.0) for each in some]
    names = dict.fromkeys(each.held for each in some)
    totals = [
        abs(
            sum(each.forecast_s for each in some if each.held == name)
            / sum(each.measured_s for each in some if each.held == name)
            - 1.0
        )
        for name in names
    ]
    off = 2.0 ** fmean(abs(log2(each.forecast_s / each.measured_s)) for each in some)
    rank = spearman([e.forecast_s for e in some], [e.measured_s for e in some]) or 0.0
    figures = f"{median(errors):.0%} | {fmean(errors):.0%} | {off:.2f} | {fmean(totals):.0%}"
    return f"| {curve.device} | {curve.method} | {count} | {figures} | {rank:.3f} |"


HEAD = """\
# A few ops of a new device

Written by `python -m tools.studies.few_ops BASE.sqlite NEW.sqlite... --out results.md`; do not
edit.

What `bigbrain-fx fit NEW.sqlite --base BASE` is worth. A base was fitted to {base} profiled ops of
this project's models; a model is left out in turn. New devices are the databases {new}
and the eight cards of the published kernels ({cards}, FP32, forward; a card is left out in turn,
its base is of the other seven). So many ops of the *other* models were measured on the new device:
chosen before anything is measured (`telling`), drawn (three times; cards: ten, families in turn),
or those of `bigbrain-fx profile` without a model. Judged are the left-out model's ops on the new
device, which neither saw. *Median*, *mean*: |forecast / measured - 1|. *Times off*: the geometric
mean of how many times too much or too little. *Sum*: of all ops of a model (a card), averaged.
How far factors are drawn towards the base, and what counts for `telling`, was chosen on the CPUs
below: their lines are not held out in that.
{note}
| new device | method | ops measured | median | mean | times off | sum | Spearman |
|---|---|---:|---:|---:|---:|---:|---:|"""


@click.command()
@click.argument("base", type=click.Path(path_type=Path, exists=True))
@click.argument("new", type=click.Path(path_type=Path, exists=True), nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The .md to write.")
@click.option("--note", default="", help="What the new devices are, in words.")
def main(base: Path, new: Sequence[Path], out: Path, note: str) -> None:
    """Write a line for each device, method and number of ops."""
    names = ", ".join(f"`{path.stem}`" for path in new)
    facts = {"new": names, "note": f"\n{note}\n" if note else ""}
    lines = [HEAD.format(base=len(_read(base)[0]), cards=len(timed_kernels()), **facts)]
    for path in new:
        lines += [line(curve, count) for curve in curves(base, path) for count in curve.judged]
    lines += [line(curve, count) for curve in card_curves() for count in curve.judged]
    out.write_text("\n".join([*lines, ""]))
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
