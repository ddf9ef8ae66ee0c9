"""A loss scale and a scheduler over all devices: in-process bundles against torch's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bundles import MODEL
from tests.verification.test_replicas import bench_of, cluster, planned, trained

SCALED = (
    MODEL.replace("def lr_scale(step):\n    return 1.0 / (1 + step)\n", "")
    + """
autocast = "float16"
grad_scaler = {"init_scale": 2.0**24, "growth_interval": 2}


def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
"""
)


@pytest.mark.parametrize(
    "choices",
    [{}, {"replicas": 2, "zero_stage": 1}, {"replicas": 2, "sum_order": "micro"}],
    ids=["pipeline", "zero 1", "micro"],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_scaled_training_has_the_bits_of_one_process(
    choices: dict[str, object], tmp_path: Path
) -> None:
    bench = replace(bench_of(tmp_path / "net.py", SCALED), steps=12)
    plan = planned(bench, cluster(2, 1, 1), **choices)
    source = replace(plan.source, has_scheduler=True, grad_scaler=bench.file.grad_scaler)
    made, different = trained(bench, replace(plan, source=source))
    assert different == ""
    assert len(made.losses) == 12
