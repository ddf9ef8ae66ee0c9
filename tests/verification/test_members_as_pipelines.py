"""What pipelines may do, tensor groups may: split backwards, ops made again, a loss scale.

In-process bundles have the bits of members in lockstep.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import BackwardWeight
from tests.verification.test_members import HEADS, planned, trained
from tests.verification.test_replicas import bench_of
from tests.verification.test_scaling import SCALED
from tools.matrix import Bench

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", HEADS)


@pytest.mark.parametrize(
    ("devices", "schedule", "choices"),
    [
        (4, "zb-h1", {"tensor_shares": (3, 1)}),
        (4, "1f1b", {"defer": (1,)}),
        (8, "zb-h1", {"replicas": 2}),
        (4, "zb-v", {}),
        (4, "dualpipe-v", {}),
        (4, "auto", {}),
        (8, "zb-h1", {"replicas": 2, "zero_stage": 2, "sum_order": "tree"}),
    ],
)
def test_gradients_of_weights_wait_as_in_pipelines(
    bench: Bench, tmp_path: Path, devices: int, schedule: str, choices: dict[str, object]
) -> None:
    """Members' sums are of the backward that makes gradients of inputs; no weight's has one."""
    plan = planned(bench, devices, schedule=schedule, **choices)
    assert plan.stages.deferring
    waits = [i for p in plan.programs for i in p.instructions if isinstance(i, BackwardWeight)]
    assert {wait.stage for wait in waits} == set(plan.stages.deferring)
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike


def test_pieces_in_turn_have_the_same_bits(bench: Bench, tmp_path: Path) -> None:
    plan = planned(bench, 4, schedule="interleaved")
    assert [len(plan.stages.of(device)) for device in plan.stages.devices] == [2] * 4
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""


def test_all_members_make_the_same_ops_again(bench: Bench, tmp_path: Path) -> None:
    plan = planned(bench, 2, recompute="ops", tensor_shares=(3, 1))
    again = [stage.again for stage in plan.stages.stages]
    assert again[0]
    assert again[0] == again[1]
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""
    assert "again(" in (tmp_path / "bundle" / "device_d0.py").read_text()


@pytest.mark.parametrize(
    ("devices", "choices"),
    [(2, {}), (4, {"tensor_shares": (3, 1), "replicas": 2, "zero_stage": 1})],
    ids=["a group", "replicas of groups"],
)
def test_scaled_training_has_the_bits_of_members_in_lockstep(
    devices: int, choices: dict[str, object], tmp_path: Path
) -> None:
    bench = replace(bench_of(tmp_path / "net.py", SCALED), steps=6)
    plan = planned(bench, devices, **choices)
    scaling = bench.file.grad_scaler
    source = replace(plan.source, has_lr_scale=False, has_scheduler=True, grad_scaler=scaling)
    made, different = trained(bench, replace(plan, source=source), tmp_path / "bundle")
    assert different == ""
    assert len(made.losses) == 6
