"""The portfolio for the largest load and its parts: integer programs, packing, bounds, chains."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.errors import NoPlanError
from tests.support.examples import examples
from tools.load_solvers.best_load import best_load, packed
from tools.load_solvers.chain_load import best_cut, piece_loads
from tools.load_solvers.load_bound import load_bound, weak_bound
from tools.load_solvers.neighbourhood import Region, placed_again, polished
from tools.load_solvers.problem import Kind, Net, Problem
from tools.load_solvers.programs import Program, available
from tools.load_solvers.reduce import shortened

quick = settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 100_000)
with_scipy = pytest.mark.skipif(not available(), reason="needs scipy, the extra `solve`")


def draw(seed: int, count: int, tight: bool = False) -> Problem:
    """Draw a small problem in an order to run, with unlike devices and cheap and dear values."""
    dice = random.Random(seed)
    room = 1.2 * count if tight else 1e9
    kinds = (Kind("a", 2, room), Kind("b", 1, room))
    pairs = {(a, b) for b in range(count) for a in range(b) if dice.random() < 0.5}
    nets = tuple(
        Net((maker, *sorted(b for a, b in pairs if a == maker)), (cost, 2 * cost))
        for maker in sorted({a for a, _ in pairs})
        for cost in [dice.choice((0.0, 0.5, 3.0))]
    )
    times = np.array([[dice.choice((0.5, 1.0, 5.0)) for _ in range(count)] for _ in kinds])
    if count > 1:
        times[1, dice.randrange(count)] = np.inf
    nbytes = np.array([float(dice.choice((0, 1, 2))) for _ in range(count)])
    return Problem(times, nbytes, tuple(sorted(pairs)), nets, kinds)


def least(problem: Problem) -> float:
    """Try every placement."""
    every = product(range(len(problem.kind_of_device)), repeat=problem.count)
    return min((problem.max_load(h) for h in every if problem.fits(h)), default=float("inf"))


@pytest.mark.nightly
@quick
@given(seed=seeds, count=st.integers(1, 6), tight=st.booleans())
def test_is_between_the_bound_and_the_contiguous_optimum(
    seed: int, count: int, tight: bool
) -> None:
    problem = draw(seed, count, tight)
    try:
        found = best_load(problem, "normal")
    except NoPlanError:
        assert least(problem) == float("inf")
        return
    assert found is not None
    assert problem.fits(found.homes)
    assert found.load == pytest.approx(problem.max_load(found.homes))
    assert found.start is None or found.load <= found.start * (1 + 1e-9)
    assert found.bound <= least(problem) * (1 + 1e-9)
    assert found.load <= least(problem) * 1.2  # a search promises nothing; it is mostly equal
    assert best_load(problem, "normal") == found


@with_scipy
@quick
@given(seed=seeds, count=st.integers(2, 6))
def test_a_region_is_placed_as_well_as_it_can_be(seed: int, count: int) -> None:
    problem, dice = draw(seed, count), random.Random(seed)
    homes = [0 if np.isinf(problem.times[1, n]) else dice.randrange(3) for n in range(count)]
    devices = dice.choice(list(combinations(range(3), 2)))
    nodes = tuple(n for n in range(count) if homes[n] in devices and dice.random() < 0.8)
    if not nodes:
        return
    found = placed_again(problem, homes, Region(nodes, devices))
    best = float(problem.loads(homes)[list(devices)].max())
    for choice in product(devices, repeat=len(nodes)):
        other = list(homes)
        for node, home in zip(nodes, choice, strict=True):
            other[node] = home
        if problem.fits(other):
            best = min(best, float(problem.loads(other)[list(devices)].max()))
    after = problem.loads(homes if found is None else found)
    assert float(after[list(devices)].max()) == pytest.approx(best, rel=2e-4)


@pytest.mark.nightly
@with_scipy
@quick
@given(seed=seeds, count=st.integers(1, 10))
def test_polishing_is_no_worse_fits_and_is_repeatable(seed: int, count: int) -> None:
    problem = draw(seed, count)
    homes = [0] * count
    found = polished(problem, homes, 6, seed)
    assert problem.fits(found)
    assert problem.max_load(found) <= problem.max_load(homes) * (1 + 1e-9)
    assert polished(problem, homes, 6, seed) == found


@with_scipy
def test_programs_keep_the_standard_output_clean(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(5):
        polished(draw(seed, 12), [0] * 12, 4)
    out, _ = capfd.readouterr()
    assert out == ""


@with_scipy
def test_a_program_says_what_is_impossible() -> None:
    program = Program()
    columns = [program.column(whole=True, cost=1.0) for _ in range(3)]
    program.row([(column, 1.0) for column in columns], least=2.0)
    answer = program.solved(100)
    assert answer.status == "best"
    assert answer.columns is not None
    assert answer.columns.sum() == 2.0
    assert answer.bound == pytest.approx(2.0)
    program.row([(column, 1.0) for column in columns], least=4.0)
    assert program.solved(100).status == "impossible"


def boxes(nbytes: list[float], room: float) -> Problem:
    """Make unconnected nodes for two devices of one kind."""
    return Problem(np.ones((1, len(nbytes))), np.array(nbytes), (), (), (Kind("a", 2, room),))


@with_scipy
def test_packing_finds_what_the_rule_of_thumb_does_not() -> None:
    problem = boxes([3, 3, 2, 2, 2], 6)  # largest first: 3 + 2 and 3 + 2, and no room for 2
    homes = packed(problem)
    assert homes is not None
    assert problem.fits(homes)


@with_scipy
def test_what_fits_nowhere_is_proven() -> None:
    with pytest.raises(NoPlanError, match="proven"):
        packed(boxes([3, 3, 3], 5))
    with pytest.raises(NoPlanError, match="divided"):
        load_bound(boxes([3, 3, 3], 4))


def test_the_bound_knows_memory() -> None:
    """Nine nodes; the fast device holds three, so the slow one has six: 6 x 2 / 1."""
    times = np.array([[1.0] * 9, [2.0] * 9])
    kinds = (Kind("fast", 1, 3.0), Kind("slow", 1, 100.0))
    problem = Problem(times, np.ones(9), (), (), kinds)
    assert weak_bound(times, [1, 1]) == pytest.approx(6.0)
    assert load_bound(problem) == pytest.approx(12.0 if available() else 6.0)


@quick
@given(seed=seeds, count=st.integers(1, 9), tight=st.booleans())
def test_piece_loads_are_loads_and_the_best_cut_is_the_best(
    seed: int, count: int, tight: bool
) -> None:
    problem = draw(seed, count, tight)
    order = list(range(count))
    pieces = piece_loads(problem, order)
    best = float("inf")
    for cuts in (c for k in range(3) for c in combinations(range(1, count), min(k, count - 1))):
        ends = [0, *cuts, count]
        for devices in product(range(3), repeat=len(ends) - 1):
            if len(set(devices)) < len(devices):
                continue
            parts = zip(devices, pairwise(ends), strict=True)
            homes = [home for home, (a, b) in parts for _ in range(a, b)]
            if not problem.fits(homes):
                continue
            loads = problem.loads(homes)
            for home, (a, b) in zip(devices, pairwise(ends), strict=True):
                kind = problem.kind_of_device[home]
                assert pieces[kind][b - 1, a] == pytest.approx(loads[home])
            best = min(best, float(loads.max()))
    found = best_cut(problem, order)
    assert (found[1] if found else float("inf")) == pytest.approx(best)
    if found:
        assert problem.fits(found[0])
        assert problem.max_load(found[0]) == pytest.approx(found[1])


def test_long_chains_are_shortened_where_little_crosses() -> None:
    wires = [5.0, 0.1] * 10
    nets = tuple(Net((i, i + 1), (wires[i],)) for i in range(19))
    edges = tuple((i, i + 1) for i in range(19))
    problem = Problem(np.ones((1, 20)), np.zeros(20), edges, nets, (Kind("a", 2),))
    small = shortened(problem, range(20), 10)
    assert small.problem.count == 10
    assert all(a == b for a, b in zip(small.group_of[::2], small.group_of[1::2], strict=True))
