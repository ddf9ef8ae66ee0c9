"""What older weights cost in accuracy: digits and a small GPT, trained to convergence, in numbers.

    python -m tools.studies.asynchronous --out rows.jsonl --write results.md
        [--only digits]

Four stages, four micro-batches, in one process: the recurrences of `--asynchronous` as loops of
plain PyTorch, which bundles equal bit for bit (`tests/verification/test_asynchronous.py` holds a
bundle against `Stale`). Counts of steps, held-out accuracy and loss; no clock is read. A training
is a row of the file: a run that was killed goes on with the next.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import torch
from torch import Tensor, nn

from models import digits, gpt
from tests.support.stale_weights import Batch, Loss, Stale, behind_of
from tools.bench.json_lines import append_line, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MICRO_BATCHES = 4
MODES = ("synchronous", "2bw", "stash")
WARM_UP, WIND_DOWN = 0.1, 0.2  # of all steps: the rate rises from zero, falls to zero
AT = (0.1, 0.25, 0.5, 0.75, 1.0)  # of all steps: where the curve is read
LOOKED_AT = 20  # times in a training
HELD_OUT = 200_000  # bytes at the end of the text
GPT_DIM = 32


@dataclass(frozen=True)
class Way:
    """What is taken of the user's rate."""

    name: str
    share: float
    warms: bool = False
    falls: bool = False

    def factor(self, done: float) -> float:
        """Return the factor of the user's rate when so much of the steps is done."""
        rise = min(1.0, done / WARM_UP) if self.warms else 1.0
        return self.share * rise * (min(1.0, (1 - done) / WIND_DOWN) if self.falls else 1.0)


USERS, HALF = Way("the user's", 1.0), Way("half", 0.5)
WARMED = Way("the user's, after a warm-up", 1.0, warms=True)
FALLING = Way("the user's, falling to zero at the end", 1.0, falls=True)
SMALLER = (Way("a quarter", 1 / 4), Way("an eighth", 1 / 8), Way("a sixteenth", 1 / 16))

# --------------------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class LearningTask:
    """A model in four stages, its data, and what is measured.

    Attributes:
        stages: beginnings of the parameters' names, by stage.
        better: of two measures, which is wanted: `max` of accuracies, `min` of losses.
        near: how near to the synchronous measure is as good.
        ways: the rates that it is trained with.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    loss: Loss
    input: str
    measure: Callable[[nn.Module], float]
    stages: tuple[tuple[str, ...], ...]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    optimizer_name: str
    rate: float
    steps: int
    seeds: int
    what: str
    better: Callable[[float, float], float]
    near: float
    ways: tuple[Way, ...] = (USERS, HALF, WARMED)

    @property
    def title(self) -> str:
        """Name it as `--only` and the page's marks do."""
        return f"{self.name} {self.optimizer_name.split(',')[0]}"

    def stage_of(self, model: nn.Module) -> dict[str, int]:
        """Return the stage of each parameter."""
        return {
            name: next(s for s, heads in enumerate(self.stages) if name.startswith(heads))
            for name, _ in model.named_parameters()
        }


def _digits(seed: int) -> Iterator[Batch]:
    for images, labels in digits.batches(seed):
        yield {"images": images, "labels": labels}


def _digits_loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"])


def _accuracy(model: nn.Module) -> float:
    images, labels = (part[-digits.HELD_OUT :] for part in digits.images_and_labels())
    return float((model(images).argmax(1) == labels).float().mean())


def _small_gpt() -> nn.Module:
    made = gpt.GPT(dim=GPT_DIM, heads=2, dropout=0.0)
    made.head.weight = nn.Parameter(made.embed.weight.detach().clone())  # stages have their own
    return made


@cache
def _bytes() -> Tensor:
    return torch.frombuffer(bytearray(gpt.text()), dtype=torch.uint8)


def _gpt_loss(output: Tensor, batch: Batch) -> Tensor:
    return gpt.loss(output, dict(batch))


def _rows(seed: int, first: int, last: int) -> Batch:
    text = _bytes()[first:last]
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - gpt.SEQUENCE, (gpt.BATCH, 1), generator=dice)
    rows = text[starts + torch.arange(gpt.SEQUENCE + 1)].long()
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def _text(seed: int) -> Iterator[Batch]:
    step = 0
    while True:
        yield _rows(seed * 1_000_003 + step, 0, -HELD_OUT)
        step += 1


def _held_out_loss(model: nn.Module) -> float:
    batches = [_rows(-1 - n, -HELD_OUT, gpt.TEXT_BYTES) for n in range(16)]
    found = [_gpt_loss(model(batch["tokens"]), batch) for batch in batches]
    return float(torch.stack(found).mean())


_CUT = (("conv1",), ("conv2",), ("hidden",), ("head",))
_DIGITS = partial(
    LearningTask,
    model=partial(digits.Net, dropout=0.0),
    batches=_digits,
    loss=_digits_loss,
    input="images",
    measure=_accuracy,
    stages=_CUT,
    steps=880,
    seeds=3,
    what="accuracy on 360 held-out images",
    better=max,
    near=0.005,
)
TASKS = (
    _DIGITS(
        name="digits",
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        optimizer_name="SGD, momentum 0.9",
        rate=0.1,
        ways=(USERS, HALF, *SMALLER, WARMED),
    ),
    _DIGITS(
        name="digits",
        optimizer=torch.optim.AdamW,
        optimizer_name="AdamW",
        rate=0.01,
    ),
    LearningTask(
        name="GPT",
        model=_small_gpt,
        batches=_text,
        loss=_gpt_loss,
        input="tokens",
        measure=_held_out_loss,
        stages=(
            ("embed", "position", "blocks.0"),
            ("blocks.1",),
            ("blocks.2",),
            ("blocks.3", "norm", "head"),
        ),
        optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.95)),
        optimizer_name="AdamW",
        rate=3e-3,
        steps=8000,
        seeds=1,
        what="loss on held-out text, nats a byte",
        better=min,
        near=0.02,
        ways=(USERS, HALF, FALLING),
    ),
)


# --------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Curve:
    """One training: what was measured, at evenly spaced steps; the last one is the end.

    Attributes:
        title: of its task.
        rate: the user's.
    """

    title: str
    rate: float
    steps: int
    mode: str
    way: str
    seed: int
    measures: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return the measure when this much of the steps was done."""
        return self.measures[int(share * LOOKED_AT) - 1]

    def reaches(self, task: LearningTask, target: float) -> int | None:
        """Return the first step that was looked at where the measure is as good as a target."""
        good = (n for n, m in enumerate(self.measures, 1) if m == m and task.better(m, target) == m)
        first = next(good, None)
        return None if first is None else first * self.steps // LOOKED_AT


def _curve_of(row: dict[str, Any]) -> Curve:
    return Curve(**{**row, "measures": tuple(map(float, row["measures"]))})


def trained(task: LearningTask, mode: str, way: Way, seed: int) -> Curve:
    """Train, and measure every twentieth part of the steps."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.rate)  # type: ignore[call-arg]
    behind = behind_of(mode, task.stage_of(model))
    loop = Stale(model, task.loss, optimizer, task.input, behind, mode == "stash")
    batches, found = task.batches(seed), list[float]()
    for step in range(1, task.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.rate * way.factor(step / task.steps)
        batch = next(batches)
        loop.step([{k: v.chunk(MICRO_BATCHES)[m] for k, v in batch.items()} for m in range(4)])
        if step % (task.steps // LOOKED_AT) == 0:
            with torch.no_grad():
                found.append(task.measure(model.eval()))
            model.train()
    return Curve(task.title, task.rate, task.steps, mode, way.name, seed, tuple(found))


Runs: TypeAlias = Mapping[tuple[str, str], Sequence[Curve]]  # of a mode and a way, by seed


def runs(task: LearningTask, out: Path | None) -> Runs:
    """Train what a file does not have yet; add each training to it."""
    had = [] if out is None else read_lines(out, "tools.studies.asynchronous", _curve_of)
    known = {replace(curve, measures=()): curve for curve in had}
    found: dict[tuple[str, str], list[Curve]] = {}
    for mode in MODES:
        for way in task.ways:
            for seed in range(task.seeds):
                key = Curve(task.title, task.rate, task.steps, mode, way.name, seed, ())
                curve = known.get(key) or _train_and_note(task, mode, way, seed, out)
                found.setdefault((mode, way.name), []).append(curve)
    return found


def _train_and_note(task: LearningTask, mode: str, way: Way, seed: int, out: Path | None) -> Curve:
    curve = trained(task, mode, way, seed)
    print(task.title, mode, way.name, seed, curve.measures[-1], file=sys.stderr, flush=True)
    if out is not None:
        append_line(out, asdict(curve))
    return curve


# --------------------------------------------------------------------------- the page


def table(task: LearningTask, found: Runs) -> Iterator[str]:
    """Yield a task's rows."""
    seeds = "1 seed" if task.seeds == 1 else f"{task.seeds} seeds, mean (lowest to highest)"
    yield f"### {task.name}, {task.optimizer_name}, the user's rate {task.rate:g}"
    yield ""
    yield f"{task.what.capitalize()}; {task.steps} steps of four micro-batches; {seeds}."
    yield ""
    heads = [f"step {int(share * task.steps)}" for share in AT]
    yield f"| | rate | {' | '.join(heads)} | as good as synchronous at |"
    yield "|---" * (3 + len(heads)) + "|"
    sign = -1 if task.better is max else 1
    ends = [curve.measures[-1] for curve in found["synchronous", USERS.name]]
    target = statistics.mean(ends) + sign * task.near
    for (mode, way), curves in found.items():
        yield _row(task, mode, way, curves, target)


def _row(task: LearningTask, mode: str, way: str, curves: Sequence[Curve], target: float) -> str:
    cells = [_cell([curve.at(share) for curve in curves]) for share in AT]
    first = [curve.reaches(task, target) for curve in curves]
    said = " / ".join("never" if step is None else f"step {step}" for step in first)
    return f"| {mode} | {way} | {' | '.join(cells)} | {said} |"


def _cell(found: Sequence[float]) -> str:
    mean = statistics.mean(found)
    if len(found) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ({min(found):.3f} to {max(found):.3f})"


def put_into(page: str, title: str, text: str) -> str:
    """Return a page with a task's table between its marks.

    Raises:
        ValueError: it has no such marks.
    """
    begin, end = f"<!-- {title} -->\n", "<!-- end -->"
    place = re.compile(f"({re.escape(begin)}).*?({end})", re.DOTALL)
    made, count = place.subn(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places {begin.strip()} ... {end}, not one")
    return made


def draw(path: Path, tasks: Mapping[str, Runs]) -> None:
    """Write the curves as SVG, the same text for the same numbers."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "bigbrain-fx", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(4 * len(tasks), 3.6), layout="constrained")
        panels = figure.subplots(1, len(tasks), squeeze=False)
        for panel, (title, found) in zip(panels.flat, tasks.items(), strict=True):
            _panel(panel, title, found)
        panels.flat[0].legend(fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(panel: Axes, title: str, found: Runs) -> None:
    colours = dict(zip(MODES, ("C0", "C1", "C2"), strict=True))
    lines = {USERS.name: "-", HALF.name: "--"}
    for (mode, way), curves in found.items():
        if way in lines:
            steps = [(n + 1) * curves[0].steps // LOOKED_AT for n in range(LOOKED_AT)]
            means = [statistics.mean(m) for m in zip(*(c.measures for c in curves), strict=True)]
            said = f"{mode}, {way if way == HALF.name else way + ' rate'}"
            panel.plot(steps, means, lines[way], color=colours[mode], linewidth=1, label=said)
    panel.set_title(title)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), help="Rows; those it has are not run.")
@click.option("--write", type=click.Path(path_type=Path), help="Put tables and curves there.")
@click.option("--only", default="", help="Tasks whose name and optimizer begin so.")
def main(out: Path | None, write: Path | None, only: str) -> None:
    """Train all, and print the tables or put them into a page."""
    torch.set_num_threads(1)
    chosen = [task for task in TASKS if task.title.startswith(only)]
    found = {task.title: runs(task, out) for task in chosen}
    tables = {task.title: "\n".join(table(task, found[task.title])) for task in chosen}
    if write is None:
        click.echo("\n\n".join(tables.values()))
        return
    page = write.read_text()
    for title, text in tables.items():
        page = put_into(page, title, text)
    write.write_text(page)
    if len(chosen) == len(TASKS):
        draw(write.with_suffix(".svg"), found)


if __name__ == "__main__":
    main()
