"""Replicas that another plan has outdone: left out early, and nothing that could win."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.plan.replicas import OutdoneError
from bigbrain_fx.plan.replicas.outdone import NEAR, SURE, Rival
from tests.support.synthetic import GIB, device
from tests.support.wide_chain import wide_chain

SOURCE = Source("scenario")
GRAPH = wide_chain(0, 6)
CLUSTER = Cluster(tuple(device(f"d{i}", memory_bytes=GIB) for i in range(3)), Link(1e-5, 1e9))
TWO = Options("chain-dp", micro_batches=4, replicas=2)
PAIR = replace(CLUSTER, devices=CLUSTER.devices[:2])


def test_replicas_far_from_the_best_are_not_planned_on() -> None:
    step_s = make_plan(GRAPH, PAIR, SOURCE, TWO).forecast.step_s
    with pytest.raises(OutdoneError, match="at the least"):
        make_plan(GRAPH, PAIR, SOURCE, TWO, rival_s=step_s / 10)


@pytest.mark.nightly
def test_replicas_as_fast_as_the_best_are_planned_as_if_they_were_alone() -> None:
    alone = make_plan(GRAPH, CLUSTER, SOURCE, TWO)
    beside = make_plan(GRAPH, CLUSTER, SOURCE, TWO, rival_s=alone.forecast.step_s)
    assert (beside.placement, beside.forecast) == (alone.placement, alone.forecast)


def test_an_even_share_of_the_fastest_is_the_least_that_all_take() -> None:
    rival = Rival(other_s=1.0, own_s=1.2)
    rival.require_worth([1.1, 9.0], [0.9, 9.0])
    with pytest.raises(OutdoneError):
        rival.require_worth([1.2 / SURE, 9.0], [0.9, 9.0])
    with pytest.raises(OutdoneError):
        Rival(other_s=1.0).require_worth([9.0, 9.0], [NEAR, NEAR])
    assert not rival.is_far()


def test_only_work_that_no_schedule_goes_below_is_left_out() -> None:
    """A search's own step is none: it may be far from the best, and split backwards go below it."""
    rival = Rival(other_s=1.0)
    rival.require_worth([2.0, 2.0], [0.9, 0.9])
    assert not rival.is_far()
    with pytest.raises(OutdoneError):
        Rival(other_s=0.1).require_worth((), [0.2])  # ZeRO divides updates, and no other work


def test_no_schedule_goes_below_the_work_of_all_devices() -> None:
    asked = Options("auto", micro_batches=4, replicas=1, tensor=1, schedule="1f1b", effort="fast")
    found = make_plan(GRAPH, CLUSTER, SOURCE, asked)
    assert found.search is not None
    for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v"):
        one = Options("chain-dp", micro_batches=4, schedule=schedule)
        step_s = make_plan(GRAPH, CLUSTER, SOURCE, one).forecast.step_s
        assert 0 < found.search.busy_s <= step_s
