"""Placements cut and scheduled in arrays: the same stages as the cut, the simulator's time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.plan.cut import cut
from bigbrain_fx.planning.stages import StageCutter
from bigbrain_fx.planning.unit_work import work
from partitioners.evaluate import Evaluator
from tests.support.examples import quick
from tests.support.placements import case, drawn_homes, placed, simulated_s, unlike

seeds = st.integers(0, 10_000)


@quick(30)
@given(seed=seeds, count=st.integers(1, 30), devices=st.integers(1, 4))
def test_stages_are_those_of_the_cut(seed: int, count: int, devices: int) -> None:
    cluster = unlike(seed, devices)
    graph, costs = case(seed, count, cluster)
    known = work(graph, costs)
    homes = drawn_homes(seed, len(known.groups), devices)
    real = cut(graph, placed(known, homes), graph.batch)
    staged = StageCutter(known, cluster).stages(homes)
    assert [f"d{device}" for device in staged.device_of] == [s.device for s in real.stages]
    assert staged.is_chain == real.is_chain
    sent = [edge.nbytes for edge in real.edges if edge.kind == "activation"]
    assert sorted(message.nbytes for message in staged.values) == sorted(sent)


@pytest.mark.parametrize(("trains", "within"), [(False, 0.02), (True, 0.15)])
@quick(30)
@given(seed=seeds, count=st.integers(1, 30), micro=st.sampled_from((1, 4)), handling=st.booleans())
def test_a_step_takes_about_what_the_simulator_says(
    trains: bool, within: float, seed: int, count: int, micro: int, handling: bool
) -> None:
    """Tied weights are exchanged in another order, and readers that detach are not told apart."""
    cluster = unlike(seed, 3, handling=handling)
    graph, costs = case(seed, count, cluster)
    graph = graph if trains else replace(graph, loss=None)
    known = work(graph, costs)
    homes = drawn_homes(seed, len(known.groups), 3)
    evaluator = Evaluator(graph, cluster, costs, micro)
    real_s = simulated_s(graph, costs, placed(known, homes), micro)
    assert evaluator.step_s(homes) == pytest.approx(real_s, rel=within)


def test_training_is_mostly_exact() -> None:
    ratios = []
    for seed in range(40):
        cluster = unlike(seed, 3)
        graph, costs = case(seed, 14, cluster)
        known = work(graph, costs)
        homes = drawn_homes(seed, len(known.groups), 3)
        real_s = simulated_s(graph, costs, placed(known, homes), 4)
        ratios.append(Evaluator(graph, cluster, costs, 4).step_s(homes) / real_s)
    assert sum(abs(ratio - 1) < 1e-2 for ratio in ratios) >= 30


def test_the_evaluator_takes_the_fastest_that_fits() -> None:
    cluster = unlike(1, 2)
    graph, costs = case(1, 8, cluster)
    evaluator = Evaluator(graph, cluster, costs, 4)
    count = len(evaluator.known.groups)
    slow, fast = sorted(((0,) * count, (1,) * count), key=evaluator.step_s, reverse=True)
    assert evaluator.best([slow, fast]) == fast
    tiny = replace(cluster, devices=tuple(replace(d, memory_bytes=1) for d in cluster.devices))
    assert Evaluator(graph, tiny, costs, 4).best([slow, fast]) is None
