"""What a few kernels that were timed on a card are worth, on published kernels and rows.

    python -m tools.studies.published_gpus.kernels [--data DIR]

`data/neusight_kernels.csv` is a draw of the kernels that NeuSight's authors timed in FP32 on eight
GPUs (github.com/sitar-lab/NeuSight, scripts/asplos/data/dataset/test, MIT; 60 linear layers, 40
batched products, 10 each of four passes over memory). Every card is taken for one that nobody
measured; some of its kernels are timed, drawn ten times, and the others forecast with what these
say of their families. With --data the same of NeuSight's whole models, FP32, on the same cards.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean

import click

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Device, KernelShape
from estimators.cuda_clock import CudaClock
from estimators.cuda_residuals import Residuals, clock_of, fitted_residuals
from tools.bench.published_gpus.forecasts import as_device, unmeasured
from tools.bench.published_gpus.rows import data_folder, read_rows
from tools.studies.published_gpus.fitting import Priced, priced

FILE = Path(__file__).resolve().parent / "neusight_kernels.csv"
COUNTS = (0, 2, 5, 10, 20)
SEEDS = 10
LEAST_S = 3e-4  # what is timed is of a model's size


@dataclass(frozen=True)
class TimedKernel:
    """One kernel on one card."""

    kernel: KernelShape
    card: str
    took_s: float


def timed_kernels(path: Path = FILE) -> tuple[TimedKernel, ...]:
    """Read the published kernels."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(map(_timed, csv.DictReader(file)))


def _timed(entry: dict[str, str]) -> TimedKernel:
    sizes = tuple(map(int, entry["sizes"].split("x")))
    if entry["family"] == "linear":  # NeuSight: batch, M, N, K
        _, rows, columns, inner = sizes
        sizes = rows, inner, columns
    elif entry["family"] == "bmm":
        batch, rows, columns, inner = sizes
        sizes = batch, rows, inner, columns
    kernel = KernelShape(entry["family"], "fp32", sizes)  # type: ignore[arg-type]  # a file's word
    return TimedKernel(kernel, entry["card"], float(entry["ms"]) / 1e3)


@cache
def nobodys(card: str) -> Device:
    """Return a card at the usual shares."""
    entry = {"name": "d0", **as_device(card, products_tf32=False)}
    return unmeasured(parse_cluster(json.dumps({"devices": [entry]}), card).devices[0])


def drawn(own: Sequence[TimedKernel], count: int, seed: int) -> tuple[list[TimedKernel], ...]:
    """Return `count` kernels of a card, families in turn and no small ones, and the others."""
    shuffled = Random(seed).sample(own, len(own))
    large = [each for each in shuffled if each.took_s >= LEAST_S]
    place: dict[str, int] = {}
    turns = []
    for each in large:
        place[each.kernel.family] = turn = place.get(each.kernel.family, 0) + 1
        turns.append((turn, each))
    ranked = [each for _, each in sorted(turns, key=lambda pair: pair[0])]
    small = [each for each in shuffled if each.took_s < LEAST_S]
    return ranked[:count], ranked[count:] + small


def kernel_errors(own: Sequence[TimedKernel], count: int) -> Iterator[tuple[str, float]]:
    """Yield family and |forecast / measured - 1| of what was not drawn."""
    device = nobodys(own[0].card)
    for seed in range(SEEDS):
        seen, others = drawn(own, count, seed)
        factors = fitted_residuals(((each.kernel, each.took_s) for each in seen), device)
        for each in others:
            clock = clock_of(each.kernel, device)
            said_s = clock.forward_s() * factors.get(clock.likeness, 1.0)
            yield each.kernel.family, abs(said_s / each.took_s - 1)


def row_error(row: Priced, device: Device, factors: Residuals) -> float:
    """Return |forecast / measured - 1| of a whole model on a card."""
    clocks = [
        (each.count, CudaClock(each.call, each.rule, each.name, device, fused=row.row.fused))
        for each in row.calls
    ]
    gpu_s = host_s = 0.0
    for count, clock in clocks:
        own_s, started_s = clock.forward_s(), clock.host_forward_s()
        if clock.call.op.requires_grad:
            own_s += clock.inputs_backward_s() + clock.weights_backward_s() + clock.fan_out_s()
            started_s += clock.host_backward_s()
        gpu_s += count * own_s * factors.get(clock.likeness, 1.0)
        host_s += count * started_s
    return abs(max(gpu_s, host_s) / row.row.step_s - 1)


def row_errors(rows: Sequence[Priced], own: Sequence[TimedKernel], count: int) -> Iterator[float]:
    """Yield the errors of a card's models with kernels drawn from the same card."""
    device = nobodys(own[0].card)
    for seed in range(SEEDS if count else 1):
        seen, _ = drawn(own, count, seed)
        factors = fitted_residuals(((each.kernel, each.took_s) for each in seen), device)
        yield from (row_error(row, device, factors) for row in rows)


def kernel_lines() -> Iterator[str]:
    """Return a line for each card and family: mean error by number of kernels."""
    timed = timed_kernels()
    cards = sorted({each.card for each in timed})
    found = {
        (card, count): list(kernel_errors([t for t in timed if t.card == card], count))
        for card in cards
        for count in COUNTS
    }
    families: dict[str, tuple[str, ...]] = {"linear": ("linear",), "bmm": ("bmm",)}
    families["passes"] = ("add", "gelu", "layer_norm", "softmax")
    for name, own in families.items():
        with_it = [c for c in cards if any(family in own for family, _ in found[c, COUNTS[-1]])]
        for card in with_it:
            yield _line(f"{name} {card}", [_mean(found[card, c], own) for c in COUNTS])
        means = [fmean(_mean(found[card, c], own) for card in with_it) for c in COUNTS]
        yield _line(f"{name}, mean of cards", means)


def _mean(errors: Sequence[tuple[str, float]], families: Sequence[str]) -> float:
    return fmean(error for family, error in errors if family in families)


def _line(name: str, errors: Sequence[float]) -> str:
    return f"{name:28}" + "".join(f"{error:8.1%}" for error in errors)


def row_lines(rows: Sequence[Priced]) -> Iterator[str]:
    """Return a line for each card: mean error of its models by number of kernels."""
    timed = timed_kernels()
    every: dict[int, list[float]] = {count: [] for count in COUNTS}
    for card in sorted({row.row.card for row in rows} & {each.card for each in timed}):
        own = [row for row in rows if row.row.card == card]
        kernels = [each for each in timed if each.card == card]
        found = {count: list(row_errors(own, kernels, count)) for count in COUNTS}
        for count, errors in found.items():
            every[count].append(fmean(errors))
        yield _line(f"models {card} ({len(own)})", [fmean(found[c]) for c in COUNTS])
    yield _line("models, mean of cards", [fmean(every[c]) for c in COUNTS])


@click.command()
@click.option("--data", type=click.Path(path_type=Path))
def main(data: Path | None) -> None:
    """Print mean errors by number of timed kernels."""
    click.echo(f"{'kernels of the card itself':28}" + "".join(f"{c:8}" for c in COUNTS))
    click.echo("\n".join(kernel_lines()))
    folder = data_folder(data)
    if folder is None:
        click.echo("no published rows here: give --data DIR for whole models")
        return
    rows = [row for row in read_rows(folder)[0] if row.source == "neusight" and row.gpus == 1]
    own = [replace(row, with_optimizer=False) for row in rows]
    click.echo("\n".join(row_lines(priced(own))))


if __name__ == "__main__":
    main()
