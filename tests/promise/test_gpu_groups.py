"""Two GPUs that compute each stage together: the losses of the same bundle on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bigbrain_fx.bundles.launch import Backend, RunOptions, run
from tests.support.command_line import call, write_cluster, write_model


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_of_gpus_trains_as_one_of_cpus_does(tmp_path: Path, backend: Backend) -> None:
    losses, chosen = [], {"cpu": None, "cuda": backend}
    for kind in ("cpu", "cuda"):
        (folder := tmp_path / kind).mkdir()
        cluster = write_cluster(folder)
        described = json.loads(cluster.read_text())
        for device in described["devices"]:
            device["kind"] = kind
        cluster.write_text(json.dumps(described))
        out, about = folder / "bundle", ("--micro-batches", "2", "--tensor-parallel", "2")
        ran = call("split", write_model(folder), "--devices", cluster, "--out", out, *about)
        assert ran.code == 0, ran.err
        options = RunOptions(steps=3, deadline_s=120.0, backend=chosen[kind])
        losses.append([step.loss for step in run(out, options).steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
