"""Sums and gathers of replicas by collectives, and when each of them begins and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Bucket,
    Cluster,
    Device,
    Edge,
    Host,
    Link,
    ParamRef,
    Recv,
    Ref,
    Send,
    Stage,
    Stages,
)
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.simulate.messages import Exchanges, Ring
from tests.support.synthetic import graph_of, op, weight

FOUR = tuple(Device(f"d{i}", f"h{i // 2}", "cuda", 1 << 30, 1e12, 1e12) for i in range(4))
INSIDE, BETWEEN = Link(1e-6, 400.0), Link(1e-5, 50.0)
LINKS = (("d0", "d1", INSIDE), ("d2", "d3", INSIDE))
TWO_HOSTS = Cluster(FOUR, BETWEEN, LINKS)


def test_a_ring_enters_each_host_once_over_the_links_of_all_its_devices() -> None:
    """600 bytes from each of four are 800 in all: half of them enter a host, at 2 x 50 a second."""
    assert Ring(TWO_HOSTS, ("d0", "d1", "d2", "d3")).wire_s(600) == 400 / 100


def test_a_ring_inside_of_a_host_goes_at_its_links_rate() -> None:
    assert Ring(TWO_HOSTS, ("d0", "d1")).wire_s(800) == 800 / 400
    assert Ring(TWO_HOSTS, ("d0", "d1")).nics_s(800) == {}


def test_a_ring_takes_the_nics_of_all_hosts() -> None:
    shared = replace(TWO_HOSTS, hosts=(Host("h0", 25.0), Host("h1", 100.0)))
    found = Ring(shared, ("d0", "d2", "d1", "d3")).nics_s(600)
    assert found == {"out of h0": 16.0, "into h0": 16.0, "out of h1": 4.0, "into h1": 4.0}


def test_latency_is_that_of_a_tree() -> None:
    devices = tuple(Device(f"d{i}", f"h{i}", "cuda", 1 << 30, 1e12, 1e12) for i in range(8))
    assert Ring(
        Cluster(devices, BETWEEN), tuple(d.name for d in devices)
    ).latency_s == pytest.approx(3e-5)


def test_a_collective_begins_when_the_last_has_joined() -> None:
    bucket = Bucket("bucket0", (0, 1), ("w",), (4, 4), "float32")
    edges = tuple(Edge("bucket0", a, 1 - a, "reduce", 16) for a in (0, 1))
    stages = Stages(
        tuple(Stage(i, f"d{i}", (), replica=i) for i in (0, 1)),
        edges,
        micros=((0, 2), (1, 3)),
        buckets=(bucket,),
        zero_stage=2,
        sum_order="backend",
    )
    found = Exchanges(stages, TWO_HOSTS)
    assert found.join(edges[0], 0, 1.0) == []
    assert found.join(edges[0], 2, 2.0) == []
    assert [at_s for _, at_s in found.join(edges[1], 1, 5.0)] == [1.0, 5.0]
    assert [at_s for _, at_s in found.join(edges[1], 3, 6.0)] == [2.0, 6.0]


def planned(zero_stage: int) -> Plan:
    options = Options("naive", micro_batches=4, replicas=4, sum_order="backend")
    chosen = replace(options, zero_stage=zero_stage)  # type: ignore[arg-type]
    cluster = Cluster(FOUR, Link(1e-5, 1e9), hosts=(Host("h0", 1e9), Host("h1", 1e9)))
    params = [weight(f"w{i}", 512, 512) for i in range(4)]
    read = ["x", "v0", "v1", "v2"]
    ops = [
        op(f"v{i}", "aten.linear.default", Ref(value), ParamRef(f"w{i}"))
        for i, value in enumerate(read)
    ]
    return make_plan(graph_of(ops, params), cluster, Source(""), chosen)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_bucket_has_a_message_a_replica(zero_stage: int) -> None:
    """Each to the next one of a ring, there and back: as many as there are replicas."""
    stages = planned(zero_stage).stages
    for bucket in stages.buckets:
        ways = [(e.kind, e.source, e.target) for e in stages.edges if e.value == bucket.name]
        ring = [*zip(bucket.stages, (*bucket.stages[1:], bucket.stages[0]), strict=True)]
        assert ways == [("reduce", *ends) for ends in ring] + [("gather", *ends) for ends in ring]


def test_weights_are_gathered_while_the_computation_before_them_runs() -> None:
    for program in planned(3).programs:
        order = [
            "join" if isinstance(each, Send) else "take" if isinstance(each, Recv) else each.do
            for each in program.instructions
            if not isinstance(each, Send | Recv) or each.edge.kind == "gather"
        ]
        runs = [place for place, what in enumerate(order) if what in ("forward", "backward")]
        assert order[: runs[0]].count("join") > order[: runs[0]].count("take") > 0
        assert order[runs[-2] : runs[-1]].count("join") == 0
