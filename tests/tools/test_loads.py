"""The random walk: its running loads against full ones, and what it may return."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.examples import examples
from tools.load_solvers.loads import Loads, improved
from tools.load_solvers.problem import Kind, Net, Problem

quick = settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 100_000)


def draw(seed: int, count: int) -> Problem:
    dice = random.Random(seed)
    kinds = (Kind("a", 2, 2.0 * count), Kind("b", 1, 3.0 * count))
    nets = tuple(
        Net(tuple(dice.sample(range(count), dice.randint(2, min(4, count)))), (cost, 2 * cost))
        for cost in (dice.choice((0.0, 0.5, 3.0)) for _ in range(count if count > 1 else 0))
    )
    times = np.array([[dice.choice((0.0, 1.0, 5.0)) for _ in range(count)] for _ in kinds])
    nbytes = np.array([float(dice.choice((0, 1, 2))) for _ in range(count)])
    return Problem(times, nbytes, (), nets, kinds)


@quick
@given(seed=seeds, count=st.integers(2, 12))
def test_loads_after_moves_are_the_loads(seed: int, count: int) -> None:
    problem, dice = draw(seed, count), random.Random(seed)
    state = Loads(problem, [dice.randrange(3) for _ in range(count)])
    for _ in range(30):
        state.move(dice.randrange(count), dice.randrange(3))
        assert state.loads == pytest.approx(problem.loads(state.homes))
        held = [
            sum(problem.nbytes[n] for n, h in enumerate(state.homes) if h == d) for d in range(3)
        ]
        assert state.held == pytest.approx(held)


@pytest.mark.nightly
@quick
@given(seed=seeds, count=st.integers(1, 12))
def test_is_no_worse_fits_and_is_repeatable(seed: int, count: int) -> None:
    problem = draw(seed, count)
    homes = [node % 3 for node in range(count)]
    if not problem.fits(homes):
        return
    found = improved(problem, homes, 300, seed)
    assert problem.fits(found)
    assert problem.max_load(found) <= problem.max_load(homes) * (1 + 1e-12)
    assert improved(problem, homes, 300, seed) == found


@pytest.mark.nightly
def test_mostly_finds_the_best_of_small_problems() -> None:
    """Every placement of five nodes on three devices is one of 243; a walk promises nothing."""
    every = [tuple(int(digit) for digit in np.base_repr(n, 3).zfill(5)) for n in range(3**5)]
    ratios = []
    for seed in range(20):
        problem = draw(seed, 5)
        fitting = [homes for homes in every if problem.fits(homes)]
        best = min(problem.max_load(homes) for homes in fitting)
        found = problem.max_load(improved(problem, fitting[0], 1500, seed))
        ratios.append(found / best if best else 1.0)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 18
    assert sum(ratios) / len(ratios) < 1.02


def test_one_device_leaves_no_choice() -> None:
    problem = Problem(np.ones((1, 3)), np.zeros(3), (), (), (Kind("a", 1),))
    assert improved(problem, [0, 0, 0], 100) == (0, 0, 0)


def test_nodes_do_not_go_where_they_cannot_run() -> None:
    times = np.array([[1.0, 1.0, 1.0], [np.inf, np.inf, 1.0]])
    problem = Problem(times, np.zeros(3), (), (), (Kind("a", 1), Kind("b", 1)))
    assert improved(problem, [0, 0, 0], 200) == (0, 0, 1)
