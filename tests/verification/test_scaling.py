"""A loss scale and a scheduler over all devices: in-process bundles against torch's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.emit import write_bundle
from bigbrain_fx.verification.imported_bundle import run_bundle
from bigbrain_fx.verification.links import same_training
from tests.support.bundles import MODEL
from tests.verification.test_replicas import bench_of, cluster, planned, trained
from tools.conformance.matrix import imported

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
SCALED = (
    MODEL.replace("def lr_scale(step):\n    return 1.0 / (1 + step)\n", "")
    + """
autocast = "float16"
grad_scaler = {"init_scale": 2.0**24, "growth_interval": 2}


def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
"""
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"replicas": 2, "zero_stage": 1},
        pytest.param({"replicas": 2, "sum_order": "micro"}, marks=pytest.mark.nightly),
    ],
    ids=["pipeline", "zero 1", "micro"],
)
def test_scaled_training_has_the_bits_of_one_process(
    choices: dict[str, object], tmp_path: Path
) -> None:
    bench = replace(bench_of(tmp_path / "net.py", SCALED), steps=12)
    plan = planned(bench, cluster(2, 1, 1), **choices)
    source = replace(plan.source, has_scheduler=True, grad_scaler=bench.file.grad_scaler)
    made, different = trained(bench, replace(plan, source=source))
    assert different == ""
    assert len(made.losses) == 12


def test_a_step_that_the_loss_scale_skips_is_not_called_equal(tmp_path: Path) -> None:
    text = SCALED.replace("2.0**24", "2.0**60")
    bench = replace(bench_of(tmp_path / "net.py", text), steps=2)
    plan = planned(bench, cluster(1, 1))
    source = replace(plan.source, has_scheduler=True, grad_scaler=bench.file.grad_scaler)
    plan = replace(plan, source=source)
    folder = write_bundle(plan, bench, tmp_path / "bundle")
    with imported(folder, force_adamw=False) as bundle:
        expected = bench.reference(plan, folder, bundle)
        checks = same_training(plan, expected, run_bundle(bundle, plan, 2, plan.seed))
    assert [check["passed"] for check in checks] == [True, None, None]
    assert "the loss scale left out all updates" in str(checks[2]["detail"])
