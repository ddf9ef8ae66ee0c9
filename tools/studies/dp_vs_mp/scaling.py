"""Steps to 95 % on digits for batches of 8 to 1024, and with weights averaged now and then.

One process, plain PyTorch; replicas of local SGD are copies in it. Each batch has the learning rate
that is best for it: with one rate for all, large batches would look worse than they are. Seconds
are processor time of a step, which others on the machine disturb little.

Source: Shallue et al., "Measuring the Effects of Data Parallelism on Neural Network Training"
(2019), for the three regimes; Stich, "Local SGD Converges Fast" (2019).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from models import digits

BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
SEEDS = (0, 1, 2)
TARGET = 0.95
EPOCHS, FEWEST = 12, 120  # most that is trained: so many epochs, or steps where that is more
REPLICAS, EVERY = 4, (1, 4, 16, 64)  # of local SGD: each trains on a fourth of a batch of 64
LOCAL_BATCH = 64


@dataclass(frozen=True)
class Scaled:
    """How a batch came to the target.

    Attributes:
        batch: rows of a step, over all replicas.
        every: weights of `REPLICAS` are averaged each so many steps; 0: one process.
        rate: the best of `RATES`.
        steps: with that, of each seed; `never` where it did not come there.
        step_s: processor seconds of a step, all replicas together; 0 where it was not taken.
    """

    batch: int
    every: int
    rate: float
    steps: tuple[int | None, ...]
    step_s: float

    @property
    def key(self) -> tuple[int, int]:
        """What it is of."""
        return self.batch, self.every

    @property
    def median(self) -> float:
        """The middle of its steps; infinite where most seeds did not come there."""
        return statistics.median(float("inf") if n is None else n for n in self.steps)


def wanted() -> Iterator[tuple[int, int]]:
    """Yield (batch, every)."""
    yield from ((batch, 0) for batch in BATCHES)
    yield from ((LOCAL_BATCH, every) for every in EVERY)


def scaled(batch: int, every: int) -> Scaled:
    """Train with each rate and seed; keep the best rate."""
    clock = StepClock()
    found = [
        Scaled(batch, every, rate, tuple(_steps(batch, every, rate, s, clock) for s in SEEDS), 0.0)
        for rate in RATES
    ]
    best = min(found, key=lambda each: each.median)
    return Scaled(batch, every, best.rate, best.steps, clock.spent_s / clock.steps)


@dataclass
class StepClock:
    """Processor seconds of steps; looking at accuracy is none of them."""

    steps: int = 0
    spent_s: float = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what is done inside."""
        start = time.process_time()
        yield
        self.spent_s += time.process_time() - start
        self.steps += 1


def most_steps(batch: int) -> int:
    """Return how many steps a batch may take."""
    return max(FEWEST, EPOCHS * len(_parts()[0]) // batch)


@cache
def _parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels to train on, then those held out."""
    images, labels = digits.images_and_labels()
    kept = len(labels) - digits.HELD_OUT
    return images[:kept], labels[:kept], images[kept:], labels[kept:]


def _accuracy(net: nn.Module) -> float:
    with torch.no_grad():
        return float((net(_parts()[2]).argmax(1) == _parts()[3]).double().mean())


def _steps(batch: int, every: int, rate: float, seed: int, clock: StepClock) -> int | None:
    """Return after how many steps the held-out accuracy is on target; None: never."""
    torch.manual_seed(seed)
    first = digits.Net(dropout=0.0)
    nets = [copy.deepcopy(first) for _ in range(REPLICAS if every else 1)]
    made = [torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9) for net in nets]
    batches = _batches(batch, seed)
    look = every or max(1, LOCAL_BATCH // batch)  # a batch of 8 is looked at each 64 rows
    for step in range(1, most_steps(batch) + 1):
        with clock.step():
            _train(nets, made, *next(batches))
            if every and step % every == 0:
                average(nets)
        if step % look == 0 and _accuracy(nets[0]) >= TARGET:
            return step
    return None


def _train(
    nets: Sequence[nn.Module],
    made: Sequence[torch.optim.Optimizer],
    images: Tensor,
    labels: Tensor,
) -> None:
    """Let each replica train on its part of a batch."""
    parts = zip(images.chunk(len(nets)), labels.chunk(len(nets)), strict=True)
    for net, optimizer, (x, y) in zip(nets, made, parts, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def average(nets: Sequence[nn.Module]) -> None:
    """Give all replicas the mean of their weights; each keeps its own momentum."""
    with torch.no_grad():
        for alike in zip(*(net.parameters() for net in nets), strict=True):
            mean = torch.stack([p.detach() for p in alike]).mean(0)
            for parameter in alike:
                parameter.copy_(mean)


def _batches(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of the training images, drawn anew when an epoch has none left."""
    images, labels, _, _ = _parts()
    dice = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels), generator=dice)
        for rows in order.split(batch):
            if len(rows) == batch:
                yield images[rows], labels[rows]
