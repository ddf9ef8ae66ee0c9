"""What older weights cost in accuracy: digits and a small GPT, trained to convergence, in numbers.

    python -m tools.asynchronous --write docs/asynchronous.md [--only digits]

Four stages, four micro-batches, in one process: the recurrences of `--asynchronous` as loops of
plain PyTorch, which bundles equal bit for bit (`tests/verification/test_asynchronous.py` holds a
bundle against `Stale`). Counts of steps, held-out accuracy and loss; no clock is read.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from torch import Tensor, nn
from torch.func import functional_call

from models import digits, gpt

STAGES, MICRO_BATCHES = 4, 4
MODES = ("synchronous", "2bw", "stash")
WAYS = ("the user's", "half", "the user's, after a warm-up")
WARM_UP = 0.1  # of all steps: the rate rises from zero
AT = (0.1, 0.25, 0.5, 1.0)  # of all steps: where the curve is read
HELD_OUT = 200_000  # bytes at the end of the text
_PAGE = re.compile(r"(<!-- rows -->\n).*?(<!-- end -->)", re.DOTALL)

Batch: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Any, Batch], Tensor]


@dataclass
class Stale:
    """A plain PyTorch model whose passes compute with older weights.

    Attributes:
        input: the entry of a batch that the model reads.
        behind: parameter -> how many updates the weights are older that its passes compute with.
        is_each: each micro-batch is an update, not each step.
    """

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    input: str
    behind: Mapping[str, int]
    is_each: bool = False
    history: deque[dict[str, Tensor]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.history = deque([weights_of(self.model)], maxlen=1 + max(self.behind.values()))

    def step(self, micros: Sequence[Batch]) -> float:
        """Train on a batch; return its loss, the mean of its micro-batches'."""
        updates = [[micro] for micro in micros] if self.is_each else [micros]
        return sum(map(self._update, updates)) / len(updates)

    def _update(self, micros: Sequence[Batch]) -> float:
        losses = [self._add_gradients(micro, len(micros)) for micro in micros]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(weights_of(self.model))
        return sum(losses) / len(losses)

    def _add_gradients(self, micro: Batch, count: int) -> float:
        newest = len(self.history) - 1
        weights = {
            name: self.history[max(0, newest - back)][name].clone().requires_grad_()
            for name, back in self.behind.items()
        }
        loss = self.loss(functional_call(self.model, weights, (micro[self.input],)), micro)
        (loss / count).backward()
        for name, parameter in self.model.named_parameters():
            before, made = parameter.grad, weights[name].grad
            parameter.grad = made if before is None or made is None else before + made
        return float(loss.detach())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def behind_of(mode: str, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Return how many updates old each parameter's version is."""
    last = max(stage_of.values())
    back = {"synchronous": 0, "2bw": 1}
    return {name: back.get(mode, last - stage) for name, stage in stage_of.items()}


# --------------------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class LearningTask:
    """A model in four stages, its data, and what is measured.

    Attributes:
        stages: beginnings of the parameters' names, by stage.
        better: of two measures, which is wanted: `max` of accuracies, `min` of losses.
        near: how near to the synchronous measure is as good.
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
    made = gpt.GPT(dim=64, dropout=0.0)
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
        steps=1600,
        seeds=1,
        what="loss on held-out text, nats a byte",
        better=min,
        near=0.02,
    ),
)


# --------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Curve:
    """One training: the measure at some steps, ascending."""

    measures: Mapping[int, float]

    def reaches(self, task: LearningTask, target: float) -> int | None:
        """Return the first step that was looked at where the measure is as good as a target."""
        good = (s for s, m in self.measures.items() if m == m and task.better(m, target) == m)
        return next(good, None)


def trained(task: LearningTask, mode: str, way: str, seed: int) -> Curve:
    """Train, and measure every twentieth part of the steps."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.rate)  # type: ignore[call-arg]
    behind = behind_of(mode, task.stage_of(model))
    loop = Stale(model, task.loss, optimizer, task.input, behind, mode == "stash")
    batches, found = task.batches(seed), dict[int, float]()
    for step in range(1, task.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.rate * _share(way, step / task.steps)
        batch = next(batches)
        loop.step([{k: v.chunk(MICRO_BATCHES)[m] for k, v in batch.items()} for m in range(4)])
        if step % (task.steps // 20) == 0:
            with torch.no_grad():
                found[step] = task.measure(model.eval())
            model.train()
    return Curve(found)


def _share(way: str, done: float) -> float:
    """Return what a way takes of the user's rate."""
    if way == "half":
        return 0.5
    return min(1.0, done / WARM_UP) if "warm-up" in way else 1.0


# --------------------------------------------------------------------------- the page


def table(task: LearningTask) -> Iterator[str]:
    """Yield a task's rows."""
    seeds = "1 seed" if task.seeds == 1 else f"{task.seeds} seeds, mean (lowest to highest)"
    yield f"### {task.name}, {task.optimizer_name}, the user's rate {task.rate:g}"
    yield ""
    yield f"{task.what.capitalize()}; {task.steps} steps of four micro-batches; {seeds}."
    yield ""
    heads = [f"step {int(share * task.steps)}" for share in AT]
    yield f"| | rate | {' | '.join(heads)} | as good as synchronous at |"
    yield "|---" * (3 + len(heads)) + "|"
    target: float | None = None
    for mode in MODES:
        for way in WAYS:
            curves = [trained(task, mode, way, seed) for seed in range(task.seeds)]
            ends = [list(curve.measures.values())[-1] for curve in curves]
            if target is None:
                sign = -1 if task.better is max else 1
                target = sum(ends) / len(ends) + sign * task.near
            print(task.name, task.optimizer_name, mode, way, ends, file=sys.stderr, flush=True)
            yield _row(task, mode, way, curves, target)
    yield ""


def _row(task: LearningTask, mode: str, way: str, curves: Sequence[Curve], target: float) -> str:
    cells = [_cell([c.measures[int(share * task.steps)] for c in curves]) for share in AT]
    first = [curve.reaches(task, target) for curve in curves]
    said = " / ".join("never" if step is None else f"step {step}" for step in first)
    return f"| {mode} | {way} | {' | '.join(cells)} | {said} |"


def _cell(found: Sequence[float]) -> str:
    mean = sum(found) / len(found)
    if len(found) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ({min(found):.3f} to {max(found):.3f})"


@click.command(help=__doc__)
@click.option("--write", type=click.Path(path_type=Path), help="Put the tables into this page.")
@click.option("--only", default="", help="Tasks whose name and optimizer begin so.")
def main(write: Path | None, only: str) -> None:
    """Train all, and print the tables or put them into a page."""
    torch.set_num_threads(1)
    chosen = [t for t in TASKS if f"{t.name} {t.optimizer_name}".startswith(only)]
    lines = (line for task in chosen for line in table(task))
    if write is None:
        for line in lines:
            click.echo(line)
        return
    text = "\n".join(lines)
    page = write.read_text()
    made = _PAGE.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", page)
    write.write_text(made)


if __name__ == "__main__":
    main()
