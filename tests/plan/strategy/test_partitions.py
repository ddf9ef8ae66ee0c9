"""Replicas of any sets of devices: each partition once, idle devices, nearest neighbours."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.plan import Options, Plan
from bigbrain_fx.plan.strategy.partitions import FEW, has_partitions, partitions
from tests.plan.tensor.test_together import cluster, graph, planned, work
from tools.conformance.brute_force.instances import drawn
from tools.conformance.brute_force.judge import planned as planned_by_auto

NUMBERS = (3, 8, 23, 4)
"""For 2 to 5 things: partitions in two parts at least, where things may also be left out."""


@pytest.fixture(autouse=True)
def _told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbrain_fx.plan.fastest.CPU", 0.0)


def sizes(where: Cluster) -> list[list[int]]:
    return sorted(sorted(map(len, sets)) for sets in partitions(where))


def test_identical_devices_are_partitioned_by_numbers_alone() -> None:
    every = [[1, 1], [1, 1, 1], [1, 1, 1, 1], [1, 1, 2], [1, 2], [1, 3], [2, 2]]
    assert sizes(cluster(1, 1, 1, 1)) == every
    known = [(("d0", "d2"), ("d1", "d3"))]
    assert len(list(partitions(cluster(1, 1, 1, 1), known))) == len(every) - 1


def test_unlike_devices_are_partitioned_in_every_way() -> None:
    """Of four things there are 52 partitions of some of them, 16 of one part or none."""
    found = list(partitions(cluster(4, 3, 2, 1)))
    assert len(found) == 52 - 16
    assert len({frozenset(map(frozenset, sets)) for sets in found}) == len(found)


def test_many_devices_have_numbers_of_replicas_that_do_not_divide_them() -> None:
    where = cluster(*[1] * (FEW + 2))
    found = list(partitions(where))
    assert {len(sets) for sets in found} == {3, 5, 6, 7}
    assert [2, 2, 2] in [[*map(len, sets)] for sets in found]
    assert [3, 3, 2] in [[*map(len, sets)] for sets in found]
    slow = replace(where.devices[0], flops_per_s=where.devices[0].flops_per_s / 2)
    slower = replace(where, devices=(slow, *where.devices[1:]))
    assert all("d0" not in own for own in max(partitions(slower), key=len)[:7])


def test_each_kind_of_many_devices_may_have_replicas_of_its_own_size() -> None:
    found = list(partitions(cluster(2, 2, 1, 1, 1, 1, 1, 1)))
    assert (("d0",), ("d1",), ("d2", "d3"), ("d4", "d5"), ("d6", "d7")) in found
    assert (("d0",), ("d1",)) in found
    assert len({frozenset(sets) for sets in found}) == len(found)


def test_no_partitions_where_replicas_are_given_or_devices_too_few() -> None:
    assert has_partitions(cluster(1, 1, 1), Options(replicas=0))
    assert not has_partitions(cluster(1, 1, 1), Options(replicas=2))
    assert not has_partitions(cluster(1, 1, 1), Options(replicas=0, tensor=2))
    assert not has_partitions(cluster(1, 1), Options(replicas=0))


def test_a_device_is_idle_where_micro_batches_are_fewer() -> None:
    """Three micro-batches, four devices: three replicas of one device each."""
    plan = planned_by_auto(drawn(141), "normal")
    assert plan is not None
    assert [len(own) for own in plan.stages.micros] == [1, 1, 1]
    assert len(plan.stages.devices) == 3


@pytest.mark.parametrize(("seed", "micros"), [(219, [1, 2]), (251, [1, 3])])
def test_a_pipeline_beside_one_device_computes_more_micro_batches(
    seed: int, micros: list[int]
) -> None:
    plan = planned_by_auto(drawn(seed), "normal")
    assert plan is not None
    assert sorted(map(len, plan.stages.micros)) == micros
    assert len(plan.stages.devices) == 3


def test_replicas_are_of_devices_with_quick_links_between_them() -> None:
    pairs = {frozenset(own) for own in by_pairs(paired()).values()}
    assert pairs == {frozenset(("d0", "d2")), frozenset(("d1", "d3"))}


@pytest.mark.nightly
def test_replicas_do_not_depend_on_the_order_of_the_list() -> None:
    where = paired()
    steps = {
        round(planned_on(replace(where, devices=order)).forecast.step_s, 12)
        for order in permutations(where.devices)
    }
    assert len(steps) == 1


def paired() -> Cluster:
    """Four devices, quick links between the first and the third, the second and the fourth."""
    quick = Link(1e-7, 1e9)
    links = (("d0", "d2", quick), ("d1", "d3", quick))
    return replace(cluster(1, 1, 1, 1, link=Link(1e-4, 1e7)), links=links)


def planned_on(where: Cluster) -> Plan:
    return planned(work(graph()), where, micro_batches=2, tensor=1, replicas=0)


def by_pairs(where: Cluster) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for stage in planned_on(where).stages.stages:
        found.setdefault(stage.replica, []).append(stage.device)
    return found
