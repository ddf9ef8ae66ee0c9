"""Tensor groups whose members have stores: the bits of members in lockstep, bytes and seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, Source, from_json, make_plan, to_json
from tests.plan.test_offloading import with_stores
from tests.verification.test_members import HEADS, cluster, trained
from tests.verification.test_replicas import bench_of
from tools.conformance.matrix import Bench

WIDE = HEADS.replace("16", "64").replace("48", "192").replace("32", "256")
WIDE = WIDE.replace("3, 4, 4)", "3, 4, 16)")  # what is below a page stays in memory: wider layers
pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", WIDE)


def on_disk(count: int, folder: Path, capacity: int = 1 << 30) -> Cluster:
    """Return devices whose stores are in a folder; each is slower than the one before it."""
    found = with_stores(cluster(count), capacity)
    stores = (
        replace(each, folder=str(folder), bytes_per_s=each.bytes_per_s / (1 + i))
        for i, each in enumerate(found.stores)
    )
    return replace(found, stores=tuple(stores))


def planned(bench: Bench, where: Cluster, **choices: object) -> Plan:
    file, graph = bench.file, bench.captured.graph
    source = Source(str(file.path), True, False, True, True, file.clip_norm, "")
    given = {"partitioner": "naive", "micro_batches": 4, "tensor": 2, **choices}
    return make_plan(graph, where, source, Options(**given))  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        (2, {"offload": ("activations", "state"), "tensor_shares": (3, 1)}),
        (4, {"offload": ("activations", "state"), "recompute": "all"}),
        (4, {"offload": ("state",), "schedule": "zb-h1"}),
        (4, {"offload": ("activations", "state"), "replicas": 2, "zero_stage": 1}),
    ],
    ids=["shares", "recompute", "zb-h1", "zero 1"],
)
def test_a_bundle_has_the_bits_of_its_members_in_lockstep(
    bench: Bench, tmp_path: Path, devices: int, choices: dict[str, object]
) -> None:
    plan = planned(bench, on_disk(devices, tmp_path), **choices)
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike
    assert all(entry.stored_bytes for entry in plan.forecast.devices)


def test_each_member_pays_for_its_own_store(bench: Bench, tmp_path: Path) -> None:
    choices = {"offload": ("activations", "state"), "tensor_shares": (1, 1)}
    plan = planned(bench, on_disk(2, tmp_path), **choices)
    fast, slow = plan.forecast.devices
    assert slow.moved_s == pytest.approx(2 * fast.moved_s)
    assert slow.stored_bytes == fast.stored_bytes
    assert from_json(to_json(plan), "plan.json") == plan
    without = planned(bench, cluster(2), tensor_shares=(1, 1))
    assert all(
        a.peak_bytes < b.peak_bytes
        for a, b in zip(plan.forecast.devices, without.forecast.devices, strict=True)
    )
    assert plan.forecast.step_s > without.forecast.step_s


def test_a_store_that_is_too_small_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(NoPlanError, match="too small"):
        planned(bench, on_disk(2, tmp_path, 1000), offload=("state",))
