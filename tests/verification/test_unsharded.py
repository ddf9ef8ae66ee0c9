"""ZeRO 3: weights divided among replicas, gathered for each run of a stage, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bigbrain_fx.core import Cluster, Link, Recv, Send
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Plan, fold, replica_cut
from bigbrain_fx.plan.memory_check import needed_bytes
from tests.support.bundles import MODEL
from tests.verification.test_replicas import (
    BATCH_NORM,
    MAYBE,
    bench_of,
    cluster,
    planned,
    same,
    trained,
)
from tools.conformance.matrix import Bench

TIMES = 2.5  # one device's peak, of what each of four has


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model has several parts and buckets, too; one thread, as a device of a bundle has."""
    monkeypatch.setattr(fold, "LEAST_PART", 1024)
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 2048)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", MODEL)


def divided(bench: Bench, devices: int, replicas: int, **choices: object) -> Plan:
    given = {"zero_stage": 3, "sum_order": "micro", "replicas": replicas, **choices}
    return planned(bench, cluster(*[1] * devices), **given)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "replicas", "choices"),
    [
        (2, 2, {"replica_shares": (3, 1)}),
        (4, 2, {"sum_order": "tree", "recompute": "all"}),
        (6, 3, {"sum_order": "tree", "replica_shares": (4, 3, 1)}),
    ],
)
def test_a_bundle_has_the_bits_of_one_process(
    bench: Bench, devices: int, replicas: int, choices: dict[str, object]
) -> None:
    plan = divided(bench, devices, replicas, **choices)
    assert len(plan.stages.stages) > 2 * devices
    assert trained(bench, plan)[1] == ""


@pytest.mark.nightly
def test_any_replicas_and_shares_have_the_same_bits(bench: Bench) -> None:
    first, _ = trained(bench, divided(bench, 2, 2, sum_order="tree"))
    shares = {"replica_shares": (5, 2, 1), "sum_order": "tree"}
    second, fault = trained(bench, divided(bench, 3, 3, **shares))
    assert fault == ""
    assert same(first, second)


@pytest.mark.nightly
def test_replicas_may_be_cut_unlike(bench: Bench) -> None:
    where = cluster(2, 1, 1, replicas=(("d0",), ("d1", "d2")))
    plan = planned(bench, where, zero_stage=3, sum_order="micro", replica_shares=(5, 3))
    assert trained(bench, plan)[1] == ""


@pytest.mark.nightly
def test_batch_norms_and_weights_that_some_micro_batches_leave_out(tmp_path: Path) -> None:
    norm, head = "nn.LayerNorm(16)", "\n        self.head"
    text = BATCH_NORM.replace("class Net(", MAYBE).replace("Rows()" + head, "Maybe()" + head)
    assert "Maybe()" in text
    assert norm not in text
    found = bench_of(tmp_path / "net.py", text, leaves=("Maybe",))
    plan = divided(found, 2, 2, micro_batches=4)
    assert any(bucket.marks for bucket in plan.stages.buckets)
    assert plan.stages.statistics
    assert trained(found, plan)[1] == ""


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
def test_a_model_that_no_device_holds_trains_on_four(tmp_path: Path) -> None:
    """Weights, gradients and the optimizer's state are two and a half times what a device has."""
    text = MODEL.replace("16, 32", "256, 1024").replace("32, 16", "1024, 256").replace("16", "256")
    text = text.replace("range(4)", "range(12)")
    found = bench_of(tmp_path / "net.py", text)
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
