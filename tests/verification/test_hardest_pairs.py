"""Features that are hardest together, bit by bit: see docs/reference/pairs.md for every pair."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.core import Link
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.plan import replica_cut
from bigbrain_fx.verification.imported_bundle import run_bundle
from bigbrain_fx.verification.members import same_graph
from tests.support.bundles import MODEL
from tests.verification.test_members import (
    HEADS,
    planned as planned_in_groups,
    trained as trained_in_groups,
)
from tests.verification.test_members_sequence import AXES, sequences
from tests.verification.test_replicas import bench_of, cluster, planned, same, trained
from tools.conformance.matrix import Bench, imported

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")
SHARES = ((1, ()), (2, (4, 3)), (2, (3, 4)), (3, (3, 2, 2)))
THRICE = """class Thrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.mix(x))
        return self.norm(x)


class Net("""


@pytest.fixture(scope="module")
def sevenths(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    text = MODEL.replace("(8, 6)", "(14, 6)")
    assert text != MODEL
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", text)


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["micro", "tree"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_seven_micro_batches_and_a_tied_head_have_the_same_bits_for_any_replicas(
    sevenths: Bench, stages: int, zero: int, schedule: str, order: str
) -> None:
    """Every leaf is the reference's, and one, two and three replicas are equal."""
    if zero == 3 and schedule == "zb-h1":
        pytest.skip("refused: see tests/verification/test_unsharded.py")
    first = None
    for count, shares in SHARES:
        choices = {"replicas": count, "replica_shares": shares, "sum_order": order}
        choices |= {"zero_stage": zero if count > 1 else 0, "schedule": schedule}
        where = cluster(*[1] * (stages * count))
        plan = planned(sevenths, where, micro_batches=7, **choices)
        assert plan.stages.replicas == count
        found, fault = trained(sevenths, plan)
        assert fault == ""
        assert first is None or same(first, found)
        first = first or found


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [2, 3])
def test_seven_micro_batches_hold_own_rows_and_three_buckets_of_gradients(
    sevenths: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """And the last stage's: not those of a whole stage until its backward has ended."""
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 256)
    choices = {"replicas": 2, "replica_shares": (4, 3), "sum_order": "micro", "zero_stage": zero}
    plan = planned(sevenths, cluster(1, 1), micro_batches=7, schedule="1f1b", **choices)
    most = Counter[int]()
    with imported(write_bundle(plan, sevenths, tmp_path / "bundle"), force_adamw=False) as bundle:
        own = importlib.import_module("runtime.replicas").Replicas

        def counting(self: Any, *words: Any) -> bool:  # as the bundle's class has it
            added: bool = add(self, *words)
            most[id(self)] = max(most[id(self)], sum(_held_bytes(self)))
            return added

        add = own.add
        monkeypatch.setattr(own, "add", counting)
        run_bundle(bundle, plan, 1, plan.seed)
    sizes = [4 * sum(bucket.pieces) for bucket in plan.stages.buckets]
    rows = max(sum(4 * bucket.pieces[place] for bucket in plan.stages.buckets) for place in (0, 1))
    assert len(most) == 2
    assert max(most.values()) <= rows + 3 * max(sizes) < sum(sizes) + rows


def _held_bytes(replicas: Any) -> Iterator[int]:  # as the bundle's class has it
    """Yield the bytes of each memory that buckets hold."""
    running = replicas._now.values()
    parts = [part for each in running for _, _, part in (*each.total.parts, *each.own.parts)]
    own = [tensor for each in running for tensor in (each.flat, each.piece) if tensor is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*parts, *own)}
    yield from (storage.nbytes() for storage in storages.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "choices",
    [
        {"schedule": "zb-h1", "zero_stage": 2},
        {"schedule": "zb-h1", "zero_stage": 2, "recompute": "all"},
        {"schedule": "1f1b", "zero_stage": 3},
        {"schedule": "1f1b", "zero_stage": 3, "recompute": "all"},
        {"schedule": "1f1b", "zero_stage": 3, "recompute": "ops"},
    ],
    ids=str,
)
def test_a_weight_that_is_used_three_times_in_bfloat16(
    tmp_path: Path, choices: dict[str, object]
) -> None:
    """Its uses are added in the type of the cast; taps and gathered weights do not change that."""
    text = MODEL.replace("class Net(", THRICE).replace(
        "nn.LayerNorm(16)\n        self.head", "Thrice()\n        self.head"
    )
    assert "Thrice()" in text
    bench = bench_of(tmp_path / "net.py", text + '\n\nautocast = "bfloat16"\n')
    plan = planned(bench, cluster(1, 1, 1, 1), replicas=2, sum_order="micro", **choices)
    found, fault = trained(bench, plan)
    assert fault == ""
    assert all(torch.isfinite(tensor).all() for tensor in found.tensors.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("members", "devices"), [(2, 4), pytest.param(3, 6, marks=pytest.mark.nightly)]
)
def test_norms_of_a_divided_sequence_under_a_split_backward(
    tmp_path: Path, members: int, devices: int
) -> None:
    """Norms' gradients are the whole graph's, 1e-12 in float64; the bits are lockstep's."""
    bench = bench_of(tmp_path / "net.py", HEADS)
    choices = {"tensor": members, "schedule": "zb-h1", **AXES}
    plan = planned_in_groups(bench, devices, **choices)
    assert sequences(plan)
    assert plan.stages.deferring
    checked = same_graph(bench.captured, plan)
    assert checked["passed"], checked
    actual, fault = trained_in_groups(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("partitioner", "schedule", "most"),
    [("naive", "list", 6), ("naive", "zb-v", 4), ("scattered", "list", 1)],
)
def test_replicas_of_mirrored_devices_do_not_wait_for_each_other(
    sevenths: Bench, monkeypatch: pytest.MonkeyPatch, partitioner: str, schedule: str, most: int
) -> None:
    """Fast and slow devices change places; more buckets than may be out, or unlike stages in turn.

    A plan is made by the checker and the clock, here of links of 100 kB/s, and then run.
    """
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 256)
    mirrored = cluster(2, 1, 1, 2, replicas=(("d0", "d1"), ("d2", "d3")))
    where = replace(mirrored, default_link=Link(1e-3, 1e5))
    choices = {"partitioner": partitioner, "schedule": schedule, "sum_order": "micro"}
    plan = planned(sevenths, where, micro_batches=14, replicas=2, zero_stage=1, **choices)
    waiting = Counter(stage for bucket in plan.stages.buckets for stage in bucket.stages)
    assert max(waiting.values()) >= most
    assert plan.forecast.step_s > 0
    assert trained(sevenths, plan)[1] == ""
