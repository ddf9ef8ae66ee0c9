"""ZeRO 3 gathers a part of the model at a time: a few large parts, or smaller ones that fit."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.bundles import RunOptions, run, split
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.plan.memory_check import needed_bytes
from tests.plan.test_layer_by_layer import MIB, SOURCE, layers
from tests.support.synthetic import cluster_of, device
from tools.conformance.live_bytes import tracked_bytes

LAYERS = 48


def planned(memory_bytes: int) -> Plan:
    devices = (device(f"d{i}", memory_bytes=memory_bytes) for i in range(4))
    asked = Options(replicas=4, zero_stage=3, sum_order="micro", micro_batches=4)
    return make_plan(layers(LAYERS), cluster_of(*devices), SOURCE, asked)


def needed(plan: Plan) -> int:
    each = zip(plan.forecast.devices, plan.cluster.devices, strict=True)
    return max(needed_bytes(entry, device) for entry, device in each)


def stages(plan: Plan) -> int:
    return len(plan.stages.stages) // 4


@pytest.mark.nightly
def test_parts_are_as_few_as_fit() -> None:
    roomy = planned(1 << 30)
    assert stages(roomy) == 8
    smaller = planned(needed(roomy) - 1)
    assert stages(smaller) == 16
    assert needed(smaller) < needed(roomy)
    smallest = planned(needed(smaller) - 1)
    assert stages(smallest) == LAYERS  # a thirty-second is one and a half of them
    assert roomy.forecast.step_s < smaller.forecast.step_s < smallest.forecast.step_s
    with pytest.raises(NoPlanError, match="does not fit"):
        planned(needed(smallest) - MIB)


NET = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(512)
            self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(24))
            self.head = nn.Linear(512, 10)

        def forward(self, x, y):
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x), y)

    def model():
        torch.manual_seed(0)
        return Net()

    def example_batch():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(16, 512, generator=generator)
        return {"x": x, "y": torch.arange(16) % 10}

    def optimizer(named_params):
        return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)
"""
MEMORY_MIB = 324


def cluster_file(folder: Path, count: int, memory: str) -> Path:
    one = {"host": "h", "kind": "cpu", "memory": memory, "flops": "50GFLOP/s"}
    devices = [{"name": f"d{i}", "memory_bandwidth": "10GB/s", **one} for i in range(count)]
    links = {"default": {"latency": "50us", "bandwidth": "1GB/s"}}
    path = folder / f"{count}.json"
    path.write_text(json.dumps({"devices": devices, "links": links}))
    return path


def trained_plainly(model: Path) -> dict[str, torch.Tensor]:
    """Train two steps in plain PyTorch, four micro-batches each."""
    names: dict[str, Any] = {}
    exec(compile(model.read_text(), str(model), "exec"), names)  # a test's own file
    net, batch = names["model"](), names["example_batch"]()
    optimizer = names["optimizer"](list(net.named_parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in zip(batch["x"].chunk(4), batch["y"].chunk(4), strict=True):
            (net(x, y) / 4).backward()
        optimizer.step()
    return dict(net.named_parameters())


@pytest.mark.nightly
def test_a_model_of_three_times_one_device_s_memory_trains_on_four(tmp_path: Path) -> None:
    """By forecast, by live bytes of the processes, and with the bits of plain PyTorch."""
    model = tmp_path / "net.py"
    model.write_text(textwrap.dedent(NET))
    four = cluster_file(tmp_path, 4, f"{MEMORY_MIB}MiB")
    with pytest.raises(NoPlanError):
        split(model, cluster_file(tmp_path, 1, f"{3 * MEMORY_MIB}MiB"), tmp_path / "one")
    asked = Options(replicas=4, zero_stage=3, sum_order="micro", micro_batches=4)
    made = split(model, four, tmp_path / "four", asked)
    tracked = tracked_bytes(made.bundle, tmp_path)
    for entry in made.plan.forecast.devices:
        assert tracked[entry.device] < 1.05 * entry.peak_bytes
    run(made.bundle, RunOptions(2, threads=1, logs=tmp_path / "logs", save=tmp_path / "saved"))
    saved: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        saved |= load_file(file)
    plain = trained_plainly(model)
    assert saved.keys() >= plain.keys()
    assert all(torch.equal(saved[name], plain[name].detach()) for name in plain)
