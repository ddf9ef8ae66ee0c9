"""Replicas of many micro-batches: each kind is searched once, and dealt more or fewer after."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Link, ParamRef, Ref, TensorParallel
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.judge import Maker, PipelineMaker
from bigbrain_fx.plan.nouns import Case
from bigbrain_fx.plan.replicas import plan_replicas
from tests.support.synthetic import chain_graph, cluster_of, device, graph_of, op, weight


@pytest.mark.parametrize(("micro_batches", "searches"), [(96, 2), (6, 4)])
def test_a_kind_of_replica_is_searched_once_where_micro_batches_are_many(
    micro_batches: int, searches: int
) -> None:
    """Two devices, one twice as fast: for even shares, and for shares by speed where few."""
    product = op("v", "aten.linear.default", Ref("x"), ParamRef("w"))
    graph = graph_of([product], [weight("w", 256, 256)], rows=96)
    cluster, source = cluster_of(device("a", 2.0), device("b", 1.0)), Source("")
    options = Options("naive", micro_batches=micro_batches, replicas=2)
    case, asked = Case(graph, cluster, source, options), list[int | None]()

    def make(own: Case) -> Plan:
        asked.append(own.options.micro_batches)
        return make_plan(own.graph, own.cluster, own.source, own.options)

    def join(tensor: TensorParallel | None) -> Maker:
        assert tensor is None
        return PipelineMaker.of(case)

    plan = plan_replicas(case, make, join)
    assert len(asked) == searches
    assert [len(own) for own in plan.stages.micros] == [micro_batches * 2 // 3, micro_batches // 3]


@pytest.mark.parametrize(("rate", "searches"), [(1.1e9, 1), (1e3, 2)])
def test_replicas_of_the_same_devices_are_placed_alike_where_that_is_as_fast(
    rate: float, searches: int
) -> None:
    """The second one has another link, which is fast enough for the first one's cut, or not."""
    graph, devices = chain_graph(1, 8, skips=False), [device(f"d{i}", 1.0) for i in range(4)]
    cluster = replace(
        cluster_of(*devices, link=Link(1e-6, 1e9)), links=(("d2", "d3", Link(1e-6, rate)),)
    )
    cluster = replace(cluster, replicas=(("d0", "d1"), ("d2", "d3")))
    source, options = Source(""), Options("chain-dp", micro_batches=4, replicas=2)
    case, asked = Case(graph, cluster, source, options), list[Cluster]()

    def make(own: Case) -> Plan:
        asked.append(own.cluster)
        return make_plan(own.graph, own.cluster, own.source, own.options)

    def join(tensor: TensorParallel | None) -> Maker:
        return PipelineMaker.of(case)

    plan = plan_replicas(case, make, join)
    assert plan.stages.replicas == 2
    assert len({tuple(own.device) for own in asked}) == searches
