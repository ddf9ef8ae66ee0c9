"""Ways to spend a budget of images over ranks that start from different seeds.

    seeds ──▶ a round: every rank trains one network ──▶ the best half stays ──▶ ... ──▶ one network

Every method gets the same images (the budget) and the same ranks, and hands over one network. What
it costs is counted in steps and images, never in seconds. Which data, and which network, is the
`Subject`'s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

FORGETTING = 0.8  # of the loss's running mean, a step
REPORTS = 24  # points of the curve
SMALLEST_NORM = 1e-12  # of a gradient, in a logarithm


@dataclass(frozen=True)
class Subject:
    """What is trained: a network from a seed, its optimizer, a loss, and images in memory."""

    build: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    images: Tensor
    labels: Tensor
    unseen_images: Tensor
    unseen_labels: Tensor


@dataclass(frozen=True)
class Allowance:
    """How much may be spent: `ranks` networks side by side, `steps` of `rows` images on each."""

    ranks: int = 8
    steps: int = 96
    rows: int = 32

    @property
    def images(self) -> int:
        """Images that all ranks together may compute."""
        return self.ranks * self.steps * self.rows


@dataclass(frozen=True)
class Halving:
    """How candidates are judged and replaced.

    Attributes:
        rounds: rounds of selection, each of an equal share of the steps; one share is left for the
            network that wins.
        keep: the share of candidates that a round keeps.
        window: steps between two losses that are compared to see a plateau.
        flat: a candidate is on a plateau where its mean loss fell by less than this share over the
            window; a round ends when all are, or at the end of its share.
        steepness: what the logarithm of the gradient's norm takes off a candidate's loss (μ).
        noise: freed ranks go on from a survivor with so much noise, as a share of each tensor's
            standard deviation, half of it a round later; 0: freed ranks double up on survivors.
    """

    rounds: int = 3
    keep: float = 0.5
    window: int = 8
    flat: float = 0.02
    steepness: float = 0.05
    noise: float = 0.2


LOSS_ALONE = Halving(steepness=0)


@dataclass(eq=False)
class Candidate:
    """A network on its way, with its own order of the images."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    dice: torch.Generator
    history: list[float] = field(default_factory=list)  # the loss's running mean, a step
    norm: float = 1.0  # of the newest gradient

    def step(self, subject: Subject, rows: int) -> None:
        """Train on so many images, drawn with replacement."""
        drawn = torch.randint(len(subject.labels), (rows,), generator=self.dice)
        loss = subject.loss(self.net(subject.images[drawn]), subject.labels[drawn])
        self.optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        self.norm = float(torch.stack([g.norm() for g in grads]).norm())
        self.optimizer.step()
        before = self.history[-1] if self.history else loss.item()
        self.history.append(FORGETTING * before + (1 - FORGETTING) * loss.item())

    def is_flat(self, how: Halving) -> bool:
        """Return whether its loss has come to a plateau; it has made more steps than the window."""
        before, now = self.history[-1 - how.window], self.history[-1]
        return not math.isfinite(now) or before - now < how.flat * before

    def score(self, how: Halving) -> float:
        """Return its loss less what a steep gradient is worth; lower is better, never NaN."""
        found = self.history[-1] - how.steepness * math.log(max(self.norm, SMALLEST_NORM))
        return found if math.isfinite(found) else math.inf


@dataclass(frozen=True)
class Reached:
    """What a method handed over, and what that cost.

    Attributes:
        loss, accuracy: of the network that won, on images that nobody trained on.
        images: computed by all ranks.
        waited_steps: steps that had to come one after another; each is of `rows` images a rank.
        cut_short: rounds that a plateau ended.
        curve: (share of the images, unseen loss of the best candidate by its training loss).
    """

    loss: float
    accuracy: float
    images: int
    waited_steps: int
    cut_short: int
    curve: tuple[tuple[float, float], ...]


class Race:
    """One method's run: it counts every image, and looks at unseen ones for the curve alone."""

    def __init__(self, subject: Subject, allowance: Allowance, seed: int) -> None:
        self.subject, self.allowance, self.seed = subject, allowance, seed
        self.images = self.waited_steps = self.cut_short = 0
        self.curve: list[tuple[float, float]] = []

    def started(self, number: int) -> Candidate:
        """Return a fresh candidate; the same number is the same network in every method."""
        seed = self.seed * 1000 + number
        net = self.subject.build(seed)
        return Candidate(net, self.subject.optimizer(net), torch.Generator().manual_seed(seed))

    def step(self, candidates: Sequence[Candidate], rows: int) -> None:
        """Let each train one step, all at once."""
        for candidate in candidates:
            candidate.step(self.subject, rows)
        self.images += rows * len(candidates)
        self.waited_steps += 1
        assert self.images <= self.allowance.images, "a method may not spend more than it has"
        if self.images * REPORTS >= (len(self.curve) + 1) * self.allowance.images:
            best = min(candidates, key=lambda c: c.score(LOSS_ALONE))
            share = self.images / self.allowance.images
            self.curve.append((share, self.judged(best)[0]))

    def judged(self, candidate: Candidate) -> tuple[float, float]:
        """Return loss and accuracy on the unseen images; the network's mode comes back."""
        training = candidate.net.training
        candidate.net.eval()
        with torch.no_grad():
            guesses = candidate.net(self.subject.unseen_images)
        candidate.net.train(training)
        right = guesses.argmax(-1) == self.subject.unseen_labels
        loss = float(self.subject.loss(guesses, self.subject.unseen_labels))
        return loss, float(right.double().mean())

    def finish(self, candidate: Candidate) -> Candidate:
        """Spend what is left on one network, all ranks computing its batch."""
        rows = self.allowance.rows * self.allowance.ranks
        while self.images < self.allowance.images:
            self.step([candidate], min(rows, self.allowance.images - self.images))
        return candidate


# --------------------------------------------------------------------------- the methods


def alone(race: Race, how: Halving) -> Candidate:
    """Train one network on one rank: as many images, `ranks` times as many steps."""
    candidate = race.started(0)
    while race.images < race.allowance.images:
        race.step([candidate], race.allowance.rows)
    return candidate


def data_parallel(race: Race, how: Halving) -> Candidate:
    """Train one network with all ranks from the start."""
    return race.finish(race.started(0))


def best_of_all(race: Race, how: Halving) -> Candidate:
    """Train a network on each rank to the end, and take the one of the lowest training loss."""
    found = [race.started(number) for number in range(race.allowance.ranks)]
    for _ in range(race.allowance.steps):
        race.step(found, race.allowance.rows)
    return min(found, key=lambda c: c.score(LOSS_ALONE))


def halving(race: Race, how: Halving) -> Candidate:
    """Select in rounds; then all ranks go on with the network that won."""
    allowance = race.allowance
    found = [race.started(number) for number in range(allowance.ranks)]
    for turn in range(how.rounds):
        _round(race, found, how)
        kept = sorted(found, key=lambda c: c.score(how))[: max(1, int(len(found) * how.keep))]
        last = turn == how.rounds - 1
        found = kept[:1] if last else _refilled(race, kept, how, turn)
    return race.finish(found[0])


def _round(race: Race, found: Sequence[Candidate], how: Halving) -> None:
    """Train all until each is on a plateau, or the round's share of the steps is spent."""
    share = race.allowance.steps // (how.rounds + 1)
    rows = race.allowance.rows * race.allowance.ranks // len(found)
    for done in range(1, share + 1):
        race.step(found, rows)
        if how.window < done < share and all(candidate.is_flat(how) for candidate in found):
            race.cut_short += 1
            return


def _refilled(race: Race, kept: list[Candidate], how: Halving, turn: int) -> list[Candidate]:
    """Give freed ranks a survivor each, with noise; without noise survivors get their ranks."""
    if not how.noise:
        return kept
    freed = race.allowance.ranks - len(kept)
    size = how.noise / 2**turn
    return kept + [_near(kept[n % len(kept)], size, (turn + 1) * 100 + n) for n in range(freed)]


def _near(survivor: Candidate, size: float, number: int) -> Candidate:
    """Copy a candidate, its optimizer's state too, and move each tensor by some noise."""
    copied = Candidate(*copy.deepcopy((survivor.net, survivor.optimizer)), torch.Generator())
    copied.history = list(survivor.history)
    copied.dice.manual_seed(survivor.dice.initial_seed() + number)
    with torch.no_grad():
        for param in copied.net.parameters():
            spread = param.std() if param.numel() > 1 else param.abs()
            noise = torch.randn(param.shape, generator=copied.dice)
            param.add_(noise * (size * spread))
    return copied


Method = Callable[[Race, Halving], Candidate]


def raced(
    method: Method, subject: Subject, allowance: Allowance, seed: int, how: Halving
) -> Reached:
    """Run one method; every image of the allowance is spent.

    Args:
        method: how the budget is spent.
        subject: what is trained.
        allowance: the budget.
        seed: of the networks, of the order of images and of dropout.
        how: how candidates are judged.
    """
    torch.manual_seed(seed)
    race = Race(subject, allowance, seed)
    won = method(race, how)
    assert race.images == allowance.images, "methods are compared at equal budgets"
    return Reached(
        *race.judged(won), race.images, race.waited_steps, race.cut_short, tuple(race.curve)
    )
