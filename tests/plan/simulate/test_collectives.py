"""Sums and gathers of replicas in simulated time: collectives, ZeRO 3, one exchange a bucket."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bigbrain_fx.core import (
    Bucket,
    Cluster,
    Device,
    Edge,
    Forward,
    Host,
    Instruction,
    Link,
    Overheads,
    ParamRef,
    Program,
    Recv,
    Ref,
    Send,
    Stage,
    Stages,
    stages,
)
from bigbrain_fx.plan import Options, Plan, Source, make_plan, money, piece_messages
from bigbrain_fx.plan.simulate.clock import Execution
from bigbrain_fx.plan.simulate.forecast import _sent
from bigbrain_fx.plan.simulate.messages import Exchanges, Flight, Pairs, Ring, handling_s
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


# --------------------------------------------------------------------------- ZeRO 3


PART = Edge("bucket0", 0, 1, "reduce", 8)
WEIGHTS = Edge("bucket0", 0, 1, "gather", 8)


def held_until(*taken: tuple[Instruction, float]) -> dict[tuple[Edge, int | None], float]:
    """Send part, weights, part from a to b; say until when a has each, b taking them so."""
    stages: Any = SimpleNamespace(
        gathers=True,
        by_backend=False,
        stages=[SimpleNamespace(device="a"), SimpleNamespace(device="b")],
    )
    flights = [Flight(edge, micro, 0, 1, 1) for edge, micro in ((PART, 0), (WEIGHTS, 0), (PART, 1))]
    spans = {"b": [(end_s - 1, end_s) for _, end_s in taken]}
    programs = [Program("b", tuple(instruction for instruction, _ in taken))]
    found = _sent(programs, stages, Execution(spans, flights))["a"]
    return {(flight.edge, flight.micro): flight.free_s for flight in found}


def test_weights_do_not_wait_for_a_part_that_was_sent_before_them() -> None:
    taken = (Recv(WEIGHTS, 0), 2.0), (Recv(PART, 0), 9.0), (Recv(PART, 1), 10.0)
    assert held_until(*taken) == {(PART, 0): 9.0, (WEIGHTS, 0): 2.0, (PART, 1): 10.0}


def test_a_part_waits_for_those_that_were_sent_before_it() -> None:
    taken = (Recv(WEIGHTS, 0), 2.0), (Recv(PART, 1), 3.0), (Recv(PART, 0), 9.0)
    assert held_until(*taken) == {(PART, 0): 9.0, (WEIGHTS, 0): 2.0, (PART, 1): 9.0}


def test_a_part_is_taken_one_computation_late() -> None:
    taken = (
        (Recv(WEIGHTS, 0), 2.0),
        (Forward(1, 0), 3.0),
        (Recv(PART, 0), 4.0),
        (Recv(PART, 1), 5.0),
    )
    assert held_until(*taken) == {(WEIGHTS, 0): 3.0, (PART, 0): 5.0, (PART, 1): 6.0}


# --------------------------------------------------------------------------- an exchange a bucket


COUNT = 6
BUSY = Overheads(1e-5, 1e9, 1e-5, 1e-4)


def cluster(kind: str, nic: float | None = None, overheads: Overheads = BUSY) -> Cluster:
    """Describe three hosts of two devices each."""
    devices = tuple(
        Device(f"d{i}", f"h{i // 2}", kind, 1 << 32, 1e12, 1e12, overheads=overheads)  # type: ignore[arg-type]
        for i in range(COUNT)
    )
    hosts = tuple(Host(f"h{i}", nic) for i in range(3)) if nic else ()
    inside = tuple((f"d{i}", f"d{i + 1}", Link(1e-6, 1e10)) for i in range(0, COUNT, 2))
    return Cluster(devices, Link(1e-5, 1e9, usd_per_gb=1.0), inside, hosts)


def paired(where: Cluster, zero_stage: int = 0) -> Plan:
    params = [weight(f"w{i}", 2048, 2048) for i in range(7)]
    read = ["x", *(f"v{i}" for i in range(6))]
    ops = [
        op(f"v{i}", "aten.linear.default", Ref(value), ParamRef(f"w{i}"))
        for i, value in enumerate(read)
    ]
    chosen: Any = {"micro_batches": 12, "replicas": COUNT, "zero_stage": zero_stage}
    return make_plan(graph_of(ops, params, rows=12), where, Source(""), Options("naive", **chosen))


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("nic", [None, 2e9])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_exchange_is_forecast_as_all_of_its_messages(
    kind: str, nic: float | None, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = cluster(kind, nic)
    pairs = paired(where, zero_stage)
    monkeypatch.setattr(stages, "MOST_IN_PAIRS", COUNT - 1)
    whole = paired(where, zero_stage)
    count = len(whole.stages.buckets)
    assert sum(edge.kind == "reduce" for edge in whole.stages.edges) == COUNT * count
    assert piece_messages(whole.stages) == piece_messages(pairs.stages)
    assert whole.forecast.step_s == pytest.approx(pairs.forecast.step_s, rel=0.03)
    for one, other in zip(whole.forecast.devices, pairs.forecast.devices, strict=True):
        assert one.peak_bytes == other.peak_bytes


def test_each_way_of_a_sum_that_charges_for_bytes_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    where = replace(cluster("cpu"), prices=tuple((f"d{i}", 1.0) for i in range(COUNT)))
    pairs = money(paired(where))
    monkeypatch.setattr(stages, "MOST_IN_PAIRS", COUNT - 1)
    whole = money(paired(where))
    assert pairs is not None
    assert whole is not None
    assert whole.sent_usd == pytest.approx(pairs.sent_usd)
    assert whole.sent_usd > 0


def test_pieces_go_over_as_many_links_at_once_and_over_one_nic_a_host() -> None:
    where = Pairs(cluster("cuda", 1e8), tuple(f"d{i}" for i in range(4)))
    found = where.taken_s("reduce", (100, 0, 300, 0))
    assert found["reduce", "d0"] == pytest.approx(100 / 1e9)
    assert found["reduce", "d2"] == pytest.approx(300 / 1e9)
    assert found["into h0"] == found["out of h1"] == pytest.approx(2 * 100 / 1e8)
    assert found["into h1"] == found["out of h0"] == pytest.approx(2 * 300 / 1e8)
    assert where.latency_s == 1e-5


def test_a_process_handles_as_many_messages_as_there_are_pieces() -> None:
    each = Overheads(message_s=1.0, message_bytes_per_s=10.0)
    assert handling_s(each, (10, 0, 30), 0, is_own=True) == 2 * (1.0 + 1.0)
    assert handling_s(each, (10, 0, 30), 0, is_own=False) == 1.0 + 3.0
    assert handling_s(each, (10, 0, 30), 1, is_own=True) == 0.0
