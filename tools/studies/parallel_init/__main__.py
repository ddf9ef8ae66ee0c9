"""Parallel random initialisation: seeds that race on ranks, at equal budget, on the digits.

    python -m tools.studies.parallel_init --write results.md
        [--repetitions 12]

The founders' idea: ranks start from different seeds, train alone, and the best start is kept. Here
it stands beside one network on one rank, one network on all ranks (data parallel) and the best of
all seeds, each with the same images. Counts of steps and images; nothing is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from scipy.stats import t as student
from torch import nn

from models import digits
from tools.studies.parallel_init.race import (
    Allowance,
    Halving,
    Method,
    Reached,
    Subject,
    alone,
    best_of_all,
    data_parallel,
    halving,
    raced,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW = Halving()
BESIDE = "one network, data parallel"
METHODS: Mapping[str, tuple[Method, Halving]] = {
    "one network, one rank": (alone, HOW),
    BESIDE: (data_parallel, HOW),
    "best of all seeds": (best_of_all, HOW),
    "halving, ranks double up": (halving, replace(HOW, noise=0)),
    "halving, noise (the founders')": (halving, HOW),
    "the same by loss alone": (halving, replace(HOW, steepness=0)),
}
SMALLEST, LARGEST = 0.1, 3.0  # of torch's own initial weights, drawn by the seed


def usual(seed: int) -> nn.Module:
    """Return the network as torch initialises it."""
    torch.manual_seed(seed)
    return digits.Net()


def scaled(seed: int) -> nn.Module:
    """Return the network, each layer's weights scaled by the seed: a tenth to threefold."""
    net, dice = usual(seed), torch.Generator().manual_seed(seed)
    for name, param in net.named_parameters():
        if name.endswith("weight"):
            drawn = torch.rand((), generator=dice).item()
            param.data *= SMALLEST * (LARGEST / SMALLEST) ** drawn
    return net


STARTS = {"torch's own": usual, "scaled by the seed": scaled}


@dataclass(frozen=True)
class Spread:
    """A mean and half its 95 % interval (Student's t over repetitions)."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise repetitions; two at least."""
        spread = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.mean(values), float(student.ppf(0.975, len(values) - 1)) * spread)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"

    @property
    def is_zero(self) -> bool:
        """Whether the interval holds zero."""
        return abs(self.mean) <= self.half


Found = Mapping[str, Mapping[str, Sequence[Reached]]]  # start -> method -> repetitions


def subject(build: str) -> Subject:
    """Return the digits with one of `STARTS`."""
    images, labels = digits.images_and_labels()
    end = len(labels) - digits.HELD_OUT
    return Subject(
        STARTS[build],
        lambda net: digits.optimizer(net.named_parameters()),
        nn.functional.cross_entropy,
        *(images[:end], labels[:end], images[end:], labels[end:]),
    )


def study(allowance: Allowance, repetitions: int) -> Found:
    """Run every method from every start, as often as asked; one line a repetition."""
    found: dict[str, dict[str, list[Reached]]] = {}
    for start in STARTS:
        what = subject(start)
        runs: dict[str, list[Reached]] = {name: [] for name in METHODS}
        for seed in range(repetitions):
            for name, (method, how) in METHODS.items():
                runs[name].append(raced(method, what, allowance, seed, how))
            losses = ", ".join(f"{each[-1].loss:.3f}" for each in runs.values())
            click.echo(f"{start}, seed {seed}: {losses}")
        found[start] = runs
    return found


# --------------------------------------------------------------------------- the page


def page(found: Found, allowance: Allowance, repetitions: int, plot: str) -> str:
    """Return the page: what was compared, a table for each start, what it says, the curve."""
    return "\n".join(
        [
            *_head(allowance, repetitions),
            *(line for start in found for line in _section(found, start)),
            f"## On the way\n\n![unseen loss over the budget]({plot})\n",
            "The loss of the best candidate (by its training loss) on images that nobody trained",
            "on, mean over repetitions. Looking is not counted as images.",
            "",
        ]
    )


def _head(allowance: Allowance, repetitions: int) -> list[str]:
    share = allowance.steps // (HOW.rounds + 1)
    return [
        "# Parallel random initialisation\n",
        "Written by `python -m tools.studies.parallel_init --write "
        f"tools/studies/parallel_init --repetitions {repetitions}`; do not edit.\n",
        f"The digits' network, {allowance.ranks} ranks, {allowance.steps} steps of "
        f"{allowance.rows} images a rank: every method computes",
        f"{allowance.images:,} images, no more and no less, and hands over one network. `in turn` "
        "are steps that wait for each",
        "other: with as many machines, that is the time. Loss and accuracy are of "
        f"{digits.HELD_OUT} images that were never",
        f"trained on, over {repetitions} repetitions, with 95 % intervals; a difference is of the "
        "same seeds. Adam's learning",
        "rate is that of one rank everywhere.\n",
        f"Halving: {HOW.rounds} rounds; a round ends when every candidate is on a plateau (its "
        "mean loss fell by less than",
        f"{HOW.flat:.0%} in {HOW.window} steps), or after {share} steps; then {HOW.keep:.0%} stay, "
        f"by loss - {HOW.steepness} log(norm of the gradient). Freed ranks",
        "share a survivor's batch (double up), or go on from a survivor with noise of "
        f"{HOW.noise:.0%} of each tensor's",
        "standard deviation, half of it a round later. What a plateau saves, and the last share, "
        "go to the winner on all",
        f"ranks. Between rounds {allowance.ranks} numbers travel, and the survivors' weights.\n",
    ]


def _section(found: Found, start: str) -> list[str]:
    runs = found[start]
    rows = [_row(name, runs) for name in METHODS]
    return [
        f"## Initial weights: {start}\n",
        f"| method | in turn | rounds cut short | unseen loss | accuracy | loss less that of "
        f"{BESIDE} |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        _verdict(runs),
        "",
    ]


def _row(name: str, runs: Mapping[str, Sequence[Reached]]) -> str:
    each = runs[name]
    cells = (
        name,
        f"{statistics.mean(r.waited_steps for r in each):.0f}",
        f"{statistics.mean(r.cut_short for r in each):.1f}" if METHODS[name][0] is halving else "-",
        str(Spread.of([r.loss for r in each])),
        str(Spread.of([r.accuracy for r in each])),
        "-" if name == BESIDE else str(_against(name, runs)),
    )
    return f"| {' | '.join(cells)} |"


def _against(name: str, runs: Mapping[str, Sequence[Reached]]) -> Spread:
    pairs = zip(runs[name], runs[BESIDE], strict=True)
    return Spread.of([ours.loss - theirs.loss for ours, theirs in pairs])


def _verdict(runs: Mapping[str, Sequence[Reached]]) -> str:
    """Say which methods differ from data parallel beyond their interval."""
    differences = {name: _against(name, runs) for name in METHODS if name != BESIDE}
    groups = {
        "Lower": [n for n, d in differences.items() if not d.is_zero and d.mean < 0],
        "Higher": [n for n, d in differences.items() if not d.is_zero and d.mean > 0],
        "Not to be told apart": [n for n, d in differences.items() if d.is_zero],
    }
    said = [f"{what}: {', '.join(names)}." for what, names in groups.items() if names]
    return f"Against {BESIDE}, beyond the interval. {' '.join(said)}"


def draw(path: Path, found: Found) -> None:
    """Write the curves as SVG, the same text for the same numbers."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "bigbrain-fx", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        panels = figure.subplots(1, len(found), sharey=True, squeeze=False)
        for panel, start in zip(panels.flat, found, strict=True):
            _panel(panel, start, found[start])
        panels.flat[0].legend(fontsize=7)
        figure.supxlabel("share of the images")
        figure.supylabel("unseen loss, nats")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(panel: Axes, start: str, runs: Mapping[str, Sequence[Reached]]) -> None:
    for name, each in runs.items():
        points = list(zip(*(r.curve for r in each), strict=False))
        shares = [statistics.mean(share for share, _ in column) for column in points]
        losses = [statistics.mean(loss for _, loss in column) for column in points]
        panel.plot(shares, losses, linewidth=1, label=name)
    panel.set_title(start)
    panel.set_yscale("log")


@click.command()
@click.option("--write", type=click.Path(path_type=Path), help="the page; its curve beside it")
@click.option("--repetitions", default=12, show_default=True, type=click.IntRange(2))
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2))
@click.option("--steps", default=96, show_default=True, type=click.IntRange(8))
def main(write: Path | None, repetitions: int, ranks: int, steps: int) -> None:
    """Race the methods; print the page, or write it with its curve."""
    torch.set_num_threads(1)
    allowance = Allowance(ranks, steps)
    found = study(allowance, repetitions)
    plot = write.with_suffix(".svg") if write else Path("parallel_init.svg")
    text = page(found, allowance, repetitions, plot.name)
    if write is None:
        click.echo(text)
        return
    draw(plot, found)
    write.write_text(text)


if __name__ == "__main__":
    main()
