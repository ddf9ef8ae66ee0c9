"""What pipelines may do, tensor groups may: split backwards, ops made again, a loss scale.

In-process bundles have the bits of members in lockstep.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import BackwardWeight
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import write_placement
from tests.verification.test_members import HEADS, planned, trained
from tests.verification.test_replicas import bench_of
from tests.verification.test_scaling import SCALED
from tools.conformance.matrix import Bench

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", HEADS)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_all_members_make_the_same_ops_again(bench: Bench, tmp_path: Path) -> None:
    plan = planned(bench, 2, recompute="ops", tensor_shares=(3, 1))
    again = [stage.again for stage in plan.stages.stages]
    assert again[0]
    assert again[0] == again[1]
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""
    assert "again(" in (tmp_path / "bundle" / "device_d0.py").read_text()


@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        (2, {}),
        pytest.param(
            4, {"tensor_shares": (3, 1), "replicas": 2, "zero_stage": 1}, marks=pytest.mark.nightly
        ),
    ],
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


def test_modules_pinned_to_a_rank_are_on_its_group(bench: Bench, tmp_path: Path) -> None:
    """d1 is of d0's group, d3 of d2's; what is divided is exchanged where it was placed."""
    pins = (("embed", "d1"), ("blocks.0-2", "d3"), ("norm", "d0"), ("head", "d2"))
    plan = planned(bench, 4, pins=pins, tensor_shares=(3, 1))
    homes = {name: stage.device for stage in plan.stages.of_member(0) for name in stage.ops}
    found = {(op.module_path.split(".")[0], homes[op.name]) for op in plan.graph.ops}
    assert {("embed", "d0"), ("norm", "d0"), ("head", "d2")} <= found
    assert {homes[op.name] for op in plan.graph.ops if op.module_path.startswith("blocks.1")} == {
        "d2"
    }
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""


@pytest.mark.nightly
def test_a_placement_of_groups_goes_out_and_comes_back(bench: Bench, tmp_path: Path) -> None:
    plan, file = planned(bench, 4), tmp_path / "placement.json"
    write_placement(plan, file)
    again = planned(bench, 4, place=str(file))
    assert (again.stages, again.forecast) == (plan.stages, plan.forecast)
    told = json.loads(file.read_text())
    assert set(told["modules"].values()) == {"d0", "d2"}
    told["modules"]["blocks.0"] = "d3"
    file.write_text(json.dumps(told))
    moved = planned(bench, 4, place=str(file))
    assert moved.stages != plan.stages
    assert trained(bench, moved, tmp_path / "bundle")[1] == ""


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"pins": (("embed", "d0"), ("embed", "d2"))}, "embed is to be on d0 and on d2"),
        ({"pins": (("embed", "d9"),)}, "there is no device 'd9'"),
        ({"pins": (("embed", "d0"),), "partitioner": "auto"}, "does not go with --partitioner"),
    ],
)
def test_pins_of_groups_that_are_refused(
    bench: Bench, choices: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        planned(bench, 4, **choices)
