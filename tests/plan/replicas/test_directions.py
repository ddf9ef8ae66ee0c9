"""Chains of replicas are reversed where their stages then add up gradients over quicker links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.plan import Plan
from bigbrain_fx.plan.replicas import make
from bigbrain_fx.plan.replicas.directions import reversed_chain
from tests.plan.tensor.test_together import cluster, graph, planned, work


def crossed() -> Cluster:
    """Two pairs of identical devices: each device has a quick link to one of the other pair."""
    slow, quick = Link(1e-4, 1e6), Link(1e-6, 1e9)
    links = (("d0", "d2", slow), ("d1", "d3", slow), ("d0", "d3", quick), ("d1", "d2", quick))
    return replace(
        cluster(1, 1, 1, 1, link=quick), links=links, replicas=(("d0", "d1"), ("d2", "d3"))
    )


def pairs_of(plan: Plan) -> list[tuple[str, ...]]:
    """Return the devices of each replica, stage by stage."""
    count = plan.stages.replicas
    stages = [[s.device for s in plan.stages.stages if s.replica == r] for r in range(count)]
    return [tuple(own) for own in stages]


def as_asked(where: Cluster, **choices: Any) -> Plan:
    choices = {"schedule": "1f1b", "micro_batches": 4, "tensor": 1, **choices}
    return planned(work(graph()), where, **choices)


def test_stages_with_the_same_weights_have_quick_links(monkeypatch: pytest.MonkeyPatch) -> None:
    found = as_asked(crossed())
    assert set(zip(*pairs_of(found), strict=True)) in (
        {("d0", "d3"), ("d1", "d2")},
        {("d3", "d0"), ("d2", "d1")},
    )
    monkeypatch.setattr(make, "with_directions", lambda alone, join: join(alone))
    assert as_asked(crossed()).forecast.step_s > 1.1 * found.forecast.step_s


def test_only_auto_reverses_chains() -> None:
    found = as_asked(crossed(), partitioner="naive")
    assert set(zip(*pairs_of(found), strict=True)) == {("d0", "d2"), ("d1", "d3")}


def test_chains_of_unlike_devices_are_not_reversed() -> None:
    turned = reversed_chain(as_asked(cluster(1, 1)))
    assert turned is not None
    homes = as_asked(cluster(1, 1)).placement.device_of
    assert all(turned.placement.device_of[op] != home for op, home in homes.items())
    assert reversed_chain(as_asked(cluster(2, 1))) is None
    assert reversed_chain(as_asked(cluster(1))) is None
