"""ZeRO 3: weights divided among replicas, gathered for each run of a stage, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Link, Recv, Send
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Plan, fold
from bigbrain_fx.plan.memory_check import needed_bytes
from tests.support.bundles import MODEL
from tests.support.training import (
    bench_of,
    cluster,
    equal,
    planned,
)
from tools.conformance.matrix import Bench

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")
TIMES = 2.5  # one device's peak, of what each of four has


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has several parts, too."""
    monkeypatch.setattr(fold, "LEAST_PART", 1024)


def divided(bench: Bench, devices: int, replicas: int, **choices: object) -> Plan:
    given = {"zero_stage": 3, "sum_order": "micro", "replicas": replicas, **choices}
    return planned(bench, equal(devices), **given)


def test_a_device_keeps_its_share_and_gathers_the_rest_for_each_run(bench: Bench) -> None:
    plan, whole = divided(bench, 2, 2), divided(bench, 2, 2, zero_stage=2)
    weights = [entry.weights_bytes for entry in plan.forecast.devices]
    assert sum(weights) == pytest.approx(whole.forecast.devices[0].weights_bytes, rel=0.01)
    assert max(weights) < 0.6 * sum(weights)
    for program in plan.programs:
        sends = [i for i in program.instructions if isinstance(i, Send)]
        recvs = [i for i in program.instructions if isinstance(i, Recv)]
        for found in (sends, recvs):
            turns = {i.edge: 0 for i in found if i.edge.kind == "gather"}
            for each in found:
                if each.edge.kind == "gather":
                    assert each.micro == turns[each.edge]
                    turns[each.edge] += 1
            assert set(turns.values()) == {2 * 4}  # 4 micro-batches, forward and backward


@pytest.mark.nightly
def test_a_model_that_no_device_holds_trains_on_four() -> None:
    """Weights, gradients and the optimizer's state are two and a half times what a device has."""
    text = MODEL.replace("16, 32", "256, 1024").replace("32, 16", "1024, 256").replace("16", "256")
    text = text.replace("range(4)", "range(12)")
    found = bench_of(text)
    (one,) = planned(found, cluster(1)).forecast.devices
    (device,) = cluster(1).devices
    third = replace(one, peak_bytes=int(one.peak_bytes / TIMES))
    small = replace(device, memory_bytes=needed_bytes(third, device))
    where = Cluster(tuple(replace(small, name=f"d{i}") for i in range(4)), Link(50e-6, 1e9))
    choices = {"replicas": 4, "sum_order": "micro"}
    for zero in (0, 1, 2):
        with pytest.raises(NoPlanError):
            planned(found, where, zero_stage=zero, **choices)
    plan = planned(found, where, zero_stage=3, **choices)
    assert max(entry.peak_bytes for entry in plan.forecast.devices) <= third.peak_bytes
