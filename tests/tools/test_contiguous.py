"""The max-load optimum over ideals against brute force, and the steps that make it small."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from partitioners.ideals import ideals, prefixes, states, within
from tests.support.examples import examples
from tools.load_solvers.contiguous import Objective, best_contiguous
from tools.load_solvers.problem import Kind, Net, Problem
from tools.load_solvers.reduce import reduced

quick = settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 100_000)


def draw(seed: int, count: int, tight: bool = False) -> Problem:
    """Draw a small problem with 2 or 3 unlike devices, idle nodes and dear and cheap values."""
    dice = random.Random(seed)
    kinds = [Kind("a", dice.choice((1, 2)), dice.choice((6.0, 9.0)) if tight else 1e9)]
    kinds += [Kind("b", 1, 12.0 if tight else 1e9)]
    edges = sorted(
        {(a, b) for b in range(count) for a in range(b) if dice.random() < 1.6 / (count + 1)}
    )
    nets = [
        Net((maker, *(b for a, b in edges if a == maker)), (cost, cost * dice.choice((0, 1, 2))))
        for maker in sorted({a for a, _ in edges})
        for cost in [dice.choice((0.0, 0.5, 3.0, 40.0))]
    ]
    nets += [Net((b, a), (1.0, 1.0)) for a, b in edges if dice.random() < 0.3]  # gradients
    each = [[dice.choice((0.0, 1.0, 2.0, 5.0)) for _ in range(count)] for _ in kinds]
    times = np.array(each) * (np.array(each[0]) > 0)  # idle on one kind: idle on all
    for node in range(count):
        if times[0, node] and dice.random() < 0.1:
            times[1, node] = np.inf
    nbytes = np.array([float(dice.choice((0, 1, 3))) for _ in range(count)])
    return Problem(times, nbytes, tuple(edges), tuple(nets), tuple(kinds))


def chains(problem: Problem, sets: np.ndarray, length: int) -> Iterator[tuple[int, ...]]:
    inside = within(sets, sets)
    open_: list[tuple[int, ...]] = [(0,)]
    while open_:
        chain = open_.pop()
        if chain[-1] == len(sets) - 1:
            yield chain
        elif len(chain) <= length:
            open_ += [
                (*chain, j) for j in range(len(sets)) if inside[chain[-1], j] and j != chain[-1]
            ]


def brute_force(problem: Problem, objective: Objective = "max") -> float:
    """Try every chain of ideals with every order of the devices."""
    sets = ideals(problem.count, problem.edges, 10_000)
    assert sets is not None
    devices = range(len(problem.kind_of_device))
    best = float("inf")
    for chain in chains(problem, sets, len(devices)):
        for sequence in permutations(devices, len(chain) - 1):
            homes = [0] * problem.count
            for home, (small, large) in zip(sequence, pairwise(chain), strict=True):
                for node in np.flatnonzero(sets[large] & ~sets[small]):
                    homes[node] = home
            if problem.fits(homes):
                loads = problem.loads(homes)
                best = min(best, float(loads.max() if objective == "max" else loads.sum()))
    return best


@pytest.mark.nightly
@quick
@given(
    seed=seeds,
    count=st.integers(1, 7),
    tight=st.booleans(),
    objective=st.sampled_from(("max", "sum")),
)
def test_equals_brute_force(seed: int, count: int, tight: bool, objective: Objective) -> None:
    problem = draw(seed, count, tight)
    found, best = best_contiguous(problem, objective=objective), brute_force(problem, objective)
    if found is None:
        assert best == float("inf")
        return
    assert found.proven
    assert problem.fits(found.homes)
    loads = problem.loads(found.homes)
    assert (loads.max() if objective == "max" else loads.sum()) == pytest.approx(found.load)
    assert found.load == pytest.approx(best)


@quick
@given(seed=seeds, count=st.integers(1, 14))
def test_a_few_orders_are_an_upper_bound(seed: int, count: int) -> None:
    problem = draw(seed, count)
    few, every = best_contiguous(problem, most_ideals=1), best_contiguous(problem)
    assert every is not None
    assert few is not None
    assert not few.proven
    assert every.load <= few.load * (1 + 1e-12)
    assert problem.max_load(few.homes) == pytest.approx(few.load)


@quick
@given(seed=seeds, count=st.integers(1, 10), ordered=st.booleans())
def test_a_smaller_problem_counts_the_same(seed: int, count: int, ordered: bool) -> None:
    problem = draw(seed, count)
    smaller = reduced(problem, 30.0, ordered)
    devices = len(problem.kind_of_device)
    dice = random.Random(seed)
    homes = [dice.randrange(devices) for _ in range(smaller.problem.count)]
    loads = problem.loads(smaller.spread(homes))
    assert smaller.problem.loads(homes) == pytest.approx(loads, nan_ok=True)
    assert not ordered or all(a < b for a, b in smaller.problem.edges)


def test_a_load_is_time_and_what_crosses_once_per_value_and_device() -> None:
    """0 sends to 1, 2 and 3; device 0 pays once, so does device 1, though it has two readers."""
    problem = Problem(
        np.array([[1.0, 2.0, 4.0, 8.0]]),
        np.zeros(4),
        ((0, 1), (0, 2), (0, 3)),
        (Net((0, 1, 2, 3), (10.0,)),),
        (Kind("a", 3),),
    )
    assert problem.loads([0, 1, 1, 0]).tolist() == [19.0, 16.0, 0.0]
    assert problem.loads([0, 0, 0, 0]).tolist() == [15.0, 0.0, 0.0]
    assert problem.max_load([0, 1, 1, 2]) == 18.0


def test_idle_nodes_go_with_their_neighbour_and_dear_values_are_not_cut() -> None:
    """A weight (0) for 1, then 1 -> 2 over a dear value, and 2 -> 3 over a cheap one."""
    problem = Problem(
        np.array([[0.0, 1.0, 1.0, 1.0]]),
        np.ones(4),
        ((0, 1), (1, 2), (2, 3)),
        (Net((0, 1), (1.0,)), Net((1, 2), (9.0,)), Net((2, 3), (1.0,))),
        (Kind("a", 2, 100.0),),
    )
    assert reduced(problem).group_of == (0, 0, 1, 2)
    assert reduced(problem, bound=9.0).group_of == (0, 0, 0, 1)


def test_ideals_of_two_branches() -> None:
    sets = ideals(4, [(0, 1), (0, 2), (1, 3), (2, 3)], 100)
    assert sets is not None
    assert sets.astype(int).tolist() == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]
    assert ideals(4, [], 15) is None
    assert len(prefixes([(0, 1, 2, 3), (0, 2, 1, 3)])) == 6
    assert states(sets, (1, 2)).tolist() == [0, 0, 1, 2, 3, 3]


def test_more_nodes_than_bits_in_a_word() -> None:
    """A chain of 300 nodes over four devices: 75 each, and one value on either side."""
    count = 300
    problem = Problem(
        np.ones((1, count)),
        np.zeros(count),
        tuple(pairwise(range(count))),
        tuple(Net(pair, (0.5,)) for pair in pairwise(range(count))),
        (Kind("a", 4),),
    )
    found = best_contiguous(problem)
    assert found is not None
    assert found.load == 76.0
    assert found.ideals == count + 1
