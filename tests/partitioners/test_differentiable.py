"""The soft program against the hard one and its own differences; the planner against its start."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.errors import InputError
from partitioners.chain_dp import ChainDP
from partitioners.differentiable import Differentiable
from partitioners.judge import Judge
from partitioners.soft_dp import Pipeline, gap_s, hard_step, most_likely, soft_step
from tests.support.examples import examples
from tests.support.placements import case, unlike

quick = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10_000)


def drawn(seed: int, tight: bool = False) -> Pipeline:
    dice = np.random.default_rng(seed)
    units, micro = int(dice.integers(1, 8)), int(dice.integers(1, 7))
    stages = int(dice.integers(1, min(units, 4) + 1))
    fits = np.broadcast_to(~np.tri(units, units + 1, dtype=bool), (stages, units, units + 1)).copy()
    if tight:
        fits &= dice.random(fits.shape) < 0.8
    hops = dice.random((2, stages - 1, units + 1))
    return Pipeline(dice.random((stages, units)), fits, hops[0], hops[1], micro)


def every_split(pipeline: Pipeline) -> list[tuple[int, ...]]:
    units, stages = pipeline.units, pipeline.stages
    cuts = ((0, *inner, units) for inner in combinations(range(1, units), stages - 1))
    return [c for c in cuts if all(pipeline.fits[s, c[s], c[s + 1]] for s in range(stages))]


def most_s(pipeline: Pipeline, cuts: tuple[int, ...]) -> float:
    loads = [pipeline.unit_s[s, cuts[s] : cuts[s + 1]].sum() for s in range(pipeline.stages)]
    return float(max([*loads, *(pipeline.wire_s[h, cuts[h + 1]] for h in range(len(loads) - 1))]))


@quick
@given(seed=seeds, tight=st.booleans())
def test_the_hard_program_over_all_limits_is_brute_force(seed: int, tight: bool) -> None:
    pipeline = drawn(seed, tight)
    splits = every_split(pipeline)
    if not splits:
        assert hard_step(pipeline, 1.0) is None
        assert soft_step(pipeline, 1.0, 0.1) is None
        return
    best = min(pipeline.step_s(cuts) for cuts in splits)
    limits = [most_s(pipeline, cuts) for cuts in splits]
    found = [hard_step(pipeline, limit) for limit in (*limits, 0.0, 0.7)]
    assert min(each[0] for each in found if each) == pytest.approx(best)
    assert all(each[0] >= best - 1e-9 for each in found if each)
    assert all(each[1] in splits for each in found if each)


@quick
@given(seed=seeds, limit=st.floats(0, 3), heat=st.sampled_from((1.0, 0.1, 1e-3, 1e-6)))
def test_the_soft_value_is_near_the_hard_one(seed: int, limit: float, heat: float) -> None:
    pipeline = drawn(seed)
    soft, hard = soft_step(pipeline, limit, heat), hard_step(pipeline, limit)
    assert soft is not None
    assert hard is not None
    below, above = gap_s(pipeline, heat)
    assert hard[0] - below - 1e-9 <= soft.value_s <= hard[0] + above + 1e-9


@quick
@given(seed=seeds)
def test_no_temperature_is_the_hard_program(seed: int) -> None:
    pipeline, gaps = drawn(seed), []
    hard = hard_step(pipeline, 0.8)
    for heat in (0.1, 0.01, 0.001, 1e-5):
        soft = soft_step(pipeline, 0.8, heat)
        assert soft is not None
        assert hard is not None
        gaps.append(abs(soft.value_s - hard[0]))
    assert gaps[-1] < 1e-3
    assert gaps[-1] <= gaps[0] + 1e-12


@quick
@given(seed=seeds, limit=st.floats(0.1, 3), heat=st.sampled_from((1.0, 0.1, 0.03)))
def test_the_gradient_is_that_of_finite_differences(seed: int, limit: float, heat: float) -> None:
    pipeline, small = drawn(seed), 1e-6

    def value(of: Pipeline, at: float) -> float:
        found = soft_step(of, at, heat)
        assert found is not None
        return found.value_s

    soft = soft_step(pipeline, limit, heat)
    assert soft is not None
    slope = (value(pipeline, limit + small) - value(pipeline, limit - small)) / (2 * small)
    assert soft.by_limit == pytest.approx(slope, rel=1e-4, abs=1e-4)
    for hop in range(pipeline.stages - 1):
        for cut in range(pipeline.units + 1):
            step = np.zeros_like(pipeline.round_trip_s)
            step[hop, cut] = small
            up = value(replace(pipeline, round_trip_s=pipeline.round_trip_s + step), limit)
            down = value(replace(pipeline, round_trip_s=pipeline.round_trip_s - step), limit)
            slope = (up - down) / (2 * small)
            assert soft.cuts[hop, cut] == pytest.approx(slope, rel=1e-4, abs=1e-4)


@quick
@given(seed=seeds)
def test_rounding_gives_a_split_that_fits(seed: int) -> None:
    pipeline = drawn(seed, tight=True)
    splits = every_split(pipeline)
    soft = soft_step(pipeline, 1.0, 1.0)
    if soft is None:
        assert not splits
        return
    assert soft.cuts.sum(axis=1) == pytest.approx(1.0)
    assert most_likely(pipeline, soft.cuts) in splits


@settings(quick, max_examples=examples(10))
@given(seed=seeds, count=st.integers(1, 20), devices=st.integers(1, 3))
def test_is_never_worse_than_its_start(seed: int, count: int, devices: int) -> None:
    cluster = unlike(seed, devices)
    graph, costs = case(seed, count, cluster)
    judge = Judge(graph, cluster, costs, 4)
    start = judge.homes(ChainDP(4).partition(graph, cluster, costs))
    found = judge.homes(Differentiable(4, descent=8, proposals=0).partition(graph, cluster, costs))
    assert judge.step_s(found) <= judge.step_s(start) * (1 + 1e-12)
    assert judge.fits(found)


@pytest.mark.nightly
def test_by_itself_it_comes_near_to_the_exact_program() -> None:
    """It judges several splits by the simulator's time; chain-dp polishes its own by that, too."""
    ratios = []
    for seed in range(8):
        cluster = unlike(seed, 3)
        graph, costs = case(seed, 20, cluster)
        judge = Judge(graph, cluster, costs, 8)
        exact = judge.step_s(judge.homes(ChainDP(8).partition(graph, cluster, costs)))
        planner = Differentiable(8, proposals=0, descent=20, unaided=True)
        alone = judge.homes(planner.partition(graph, cluster, costs))
        ratios.append(judge.step_s(alone) / exact)
    assert max(ratios) < 1.06  # 0.96 to 1.053
    assert sum(ratios) / len(ratios) < 1.02


def test_micro_batches_must_be_positive() -> None:
    with pytest.raises(InputError, match="at least 1 micro-batch"):
        Differentiable(0)
