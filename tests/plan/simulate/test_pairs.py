"""Sums of many replicas: one exchange a bucket is forecast as all of its messages are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Device, Host, Link, Overheads, ParamRef, Ref, stages
from bigbrain_fx.plan import Options, Plan, Source, make_plan, money, piece_messages
from bigbrain_fx.plan.simulate.messages import Pairs, handling_s
from tests.support.synthetic import graph_of, op, weight

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


def planned(where: Cluster, zero_stage: int = 0) -> Plan:
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
    pairs = planned(where, zero_stage)
    monkeypatch.setattr(stages, "MOST_IN_PAIRS", COUNT - 1)
    whole = planned(where, zero_stage)
    count = len(whole.stages.buckets)
    assert sum(edge.kind == "reduce" for edge in whole.stages.edges) == COUNT * count
    assert piece_messages(whole.stages) == piece_messages(pairs.stages)
    assert whole.forecast.step_s == pytest.approx(pairs.forecast.step_s, rel=0.03)
    for one, other in zip(whole.forecast.devices, pairs.forecast.devices, strict=True):
        assert one.peak_bytes == other.peak_bytes


def test_each_way_of_a_sum_that_charges_for_bytes_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    where = replace(cluster("cpu"), prices=tuple((f"d{i}", 1.0) for i in range(COUNT)))
    pairs = money(planned(where))
    monkeypatch.setattr(stages, "MOST_IN_PAIRS", COUNT - 1)
    whole = money(planned(where))
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
