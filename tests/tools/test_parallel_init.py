"""Seeds that race: budgets are equal, the best start wins, a plateau ends a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tools.initial_race import (
    Allowance,
    Candidate,
    Halving,
    Method,
    Race,
    Subject,
    _near,
    alone,
    best_of_all,
    data_parallel,
    halving,
    raced,
)
from tools.parallel_init import METHODS, STARTS, Spread, draw, page, subject

ALLOWANCE = Allowance(ranks=6, steps=24, rows=4)
GOOD = 4  # the seed whose network learns; the others' outputs are cut off from their weights


class Line(nn.Module):
    """Two classes on a line; a dead one always says the same."""

    def __init__(self, seed: int, dead: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.line = nn.Linear(2, 2)
        self.dead = dead

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * (0.0 if self.dead else 1.0)


def points() -> Subject:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn((64, 2), generator=dice)
    y = (x.sum(1) > 0).long()
    return Subject(
        lambda seed: Line(seed, dead=seed % 1000 != GOOD),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.5),
        nn.functional.cross_entropy,
        *(x[:48], y[:48], x[48:], y[48:]),
    )


@pytest.mark.gate("0.0-data_parallel-24", "0.0-halving-24", "0.2-data_parallel-24")
@pytest.mark.parametrize(
    ("method", "in_turn"),
    [(alone, 6 * 24), (data_parallel, 24), (best_of_all, 24), (halving, 24)],
)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_every_method_spends_the_same(method: Method, in_turn: int, noise: float) -> None:
    found = raced(method, points(), ALLOWANCE, 0, Halving(noise=noise, flat=-1))
    assert found.images == ALLOWANCE.images == 6 * 24 * 4
    assert found.waited_steps == in_turn
    assert found.curve[-1][0] == 1.0
    assert found == raced(method, points(), ALLOWANCE, 0, Halving(noise=noise, flat=-1))


@pytest.mark.gate("0.0")
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_start_that_learns_wins(noise: float) -> None:
    how = Halving(noise=noise)
    assert raced(halving, points(), ALLOWANCE, 0, how).loss < 0.4
    assert raced(best_of_all, points(), ALLOWANCE, 0, how).loss < 0.6
    assert raced(alone, points(), ALLOWANCE, 0, how).loss == pytest.approx(0.6931, abs=1e-3)


def test_a_plateau_ends_a_round_and_what_it_saves_is_spent() -> None:
    dead = replace(points(), build=lambda seed: Line(seed, dead=True))
    short = raced(halving, dead, ALLOWANCE, 0, Halving(window=2))
    assert short.cut_short == 3
    assert short.images == ALLOWANCE.images
    never = raced(halving, dead, ALLOWANCE, 0, Halving(window=2, flat=-1))
    assert never.cut_short == 0


def test_what_is_no_number_is_never_kept() -> None:
    lost = Candidate(*_made(Line(0, False)), torch.Generator(), [float("nan")])
    fine = Candidate(*_made(Line(0, False)), torch.Generator(), [100.0])
    assert min((lost, fine), key=lambda c: c.score(Halving())) is fine


def test_noise_leaves_the_survivor_and_its_optimizer_alone() -> None:
    race = Race(points(), ALLOWANCE, 0)
    survivor = race.started(GOOD)
    race.step([survivor], 4)
    before = [p.detach().clone() for p in survivor.net.parameters()]
    other = _near(survivor, 0.1, 7)
    assert all(torch.equal(a, b) for a, b in zip(before, survivor.net.parameters(), strict=True))
    moved = list(other.net.parameters())
    assert not torch.equal(moved[0], before[0])
    assert (moved[0] - before[0]).abs().max() < 0.5 * before[0].std()
    assert other.optimizer.param_groups[0]["params"][0] is moved[0]


def test_an_interval_of_repetitions() -> None:
    found = Spread.of([1.0, 2.0, 3.0])
    assert str(found) == "2.000 ± 2.484"  # t(0.975, 2) = 4.303, times 1 / sqrt(3)
    assert found.is_zero
    assert not Spread.of([1.9, 2.0, 2.1]).is_zero
    assert Spread.of([-1.0, 1.0, 0.5]).is_zero


@pytest.mark.nightly
def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    small = Allowance(ranks=2, steps=8, rows=8)
    runs = {
        name: [raced(method, subject("torch's own"), small, seed, how) for seed in (0, 1)]
        for name, (method, how) in METHODS.items()
    }
    text = page(dict.fromkeys(STARTS, runs), small, 2, "curve.svg")
    assert "every method computes\n128 images" in text
    assert all(text.count(f"| {name} |") == 2 for name in METHODS)
    draw(tmp_path / "curve.svg", dict.fromkeys(STARTS, runs))
    assert "one network, one rank" in (tmp_path / "curve.svg").read_text()


def _made(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return net, torch.optim.SGD(net.parameters(), lr=0.1)
