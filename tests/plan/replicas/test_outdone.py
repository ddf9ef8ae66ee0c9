"""Replicas that another plan has outdone: left out early, and nothing that could win."""

from __future__ import annotations

import pytest

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.plan import Options, make_plan
from bigbrain_fx.plan.replicas import OutdoneError
from bigbrain_fx.plan.replicas.outdone import FAR, SURE, Rival
from tests.support.synthetic import GIB, device
from tools.planner_scenarios import SOURCE, chain

GRAPH = chain(0, 6)
CLUSTER = Cluster(tuple(device(f"d{i}", memory_bytes=GIB) for i in range(3)), Link(1e-5, 1e9))
TWO = Options("chain-dp", micro_batches=4, replicas=2)


def test_replicas_far_from_the_best_are_not_planned_on() -> None:
    step_s = make_plan(GRAPH, CLUSTER, SOURCE, TWO).forecast.step_s
    with pytest.raises(OutdoneError, match="at the least"):
        make_plan(GRAPH, CLUSTER, SOURCE, TWO, rival_s=step_s / 10)


def test_replicas_as_fast_as_the_best_are_planned_as_if_they_were_alone() -> None:
    alone = make_plan(GRAPH, CLUSTER, SOURCE, TWO)
    beside = make_plan(GRAPH, CLUSTER, SOURCE, TWO, rival_s=alone.forecast.step_s)
    assert (beside.placement, beside.forecast) == (alone.placement, alone.forecast)


def test_an_even_share_of_the_fastest_is_the_least_that_all_take() -> None:
    rival = Rival(other_s=1.0, own_s=1.2)
    rival.require_worth([1.1, 9.0])
    with pytest.raises(OutdoneError):
        rival.require_worth([1.2 / SURE, 9.0])
    with pytest.raises(OutdoneError):
        Rival(other_s=1.0).require_worth([FAR, FAR])
    assert rival.is_far(FAR)
    assert not rival.is_far(FAR - 0.01)
