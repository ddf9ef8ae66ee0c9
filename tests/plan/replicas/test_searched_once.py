"""Replicas of many micro-batches: each kind is searched once, and dealt more or fewer after."""

from __future__ import annotations

import pytest

from bigbrain_fx.core import Cluster, Graph, ParamRef, Ref, TensorParallel
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.judge import Maker, PipelineMaker
from bigbrain_fx.plan.replicas import plan_replicas
from tests.support.synthetic import cluster_of, device, graph_of, op, weight


@pytest.mark.parametrize(("micro_batches", "searches"), [(96, 2), (6, 4)])
def test_a_kind_of_replica_is_searched_once_where_micro_batches_are_many(
    micro_batches: int, searches: int
) -> None:
    """Two devices, one twice as fast: for even shares, and for shares by speed where few."""
    product = op("v", "aten.linear.default", Ref("x"), ParamRef("w"))
    graph = graph_of([product], [weight("w", 256, 256)], rows=96)
    cluster, source = cluster_of(device("a", 2.0), device("b", 1.0)), Source("")
    options = Options("naive", micro_batches=micro_batches, replicas=2)
    asked: list[int | None] = []

    def make(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
        asked.append(options.micro_batches)
        return make_plan(graph, cluster, source, options)

    def join(tensor: TensorParallel | None) -> Maker:
        assert tensor is None
        return PipelineMaker(graph, cluster, source, options)

    plan = plan_replicas(graph, cluster, source, options, make, join)
    assert len(asked) == searches
    assert [len(own) for own in plan.stages.micros] == [micro_batches * 2 // 3, micro_batches // 3]
