"""Unlike devices, of which some are a replica together, each kind by itself, or left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.plan import Options
from bigbrain_fx.plan.fastest import simplest
from bigbrain_fx.plan.strategy.space import unlike_replicas
from tests.plan.tensor.test_together import cluster, graph, planned, work


@pytest.mark.nightly
def test_auto_takes_two_replicas_of_three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fast device, and two slow ones that are as fast together: three do not divide by two."""
    monkeypatch.setattr("bigbrain_fx.plan.fastest.CPU", 0.0)
    where = cluster(2, 1, 1, link=Link(1e-7, 1e9))
    plan = planned(work(graph()), where, micro_batches=4, tensor=1, replicas=0)
    said = {each.what: each for each in plan.compared}
    assert said["2 replicas"].step_s is not None
    assert plan.cluster == where
    assert plan.forecast.step_s == min(each.step_s for each in plan.compared if each.step_s)


def far(where: Cluster, *names: str) -> Cluster:
    """Give devices a slow link to all others."""
    slow = Link(1e-3, 1e4)
    pairs = tuple((a, b, slow) for a in names for b in where.device if b not in names)
    return replace(where, links=pairs)


def test_each_kind_of_device_may_have_replicas_of_its_own_size() -> None:
    found = [each.sets for each in unlike_replicas(cluster(2, 2, 1, 1, 1, 1), Options(replicas=0))]
    assert (("d0",), ("d1",), ("d2", "d3"), ("d4", "d5")) in found
    assert (("d0",), ("d1",)) in found
    assert len(set(found)) == len(found)
    assert not list(unlike_replicas(cluster(1, 1), Options(replicas=0)))
    assert not list(unlike_replicas(cluster(2, 1), Options(replicas=2)))


def test_auto_leaves_out_a_device_behind_a_slow_link() -> None:
    where = far(cluster(2, 2, 1), "d2")
    plan = planned(work(graph()), where, micro_batches=4, tensor=1, replicas=0)
    assert set(plan.stages.devices) <= {"d0", "d1"}
    assert plan.stages.replicas == 2
    assert plan.cluster == where
    assert "2 replicas of 1 device, 2 in all" in {each.what for each in plan.compared}


def test_of_equal_plans_the_one_that_combines_fewer_ways_is_taken() -> None:
    """Four replicas of one device are one way; two replicas of pipelines are two."""
    found, where = work(graph()), cluster(1, 1, 1, 1)
    plans = [planned(found, where, micro_batches=4, tensor=1, replicas=n) for n in (2, 4)]
    assert simplest(plans, 1e9) is plans[1]
