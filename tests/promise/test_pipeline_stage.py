"""Chain bundles under torch.distributed.pipelining through `as_pipeline_stage`.

GPT has a tied weight on its first and last stage, U-Net has skips that cross every cut. Losses and
gradients of one step are those of the bundle's own runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bigbrain_fx
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime import Device, Stage
from bigbrain_fx.runtime.pipelining import as_pipeline_stage
from models import gpt, unet
from tests.bundles import cluster
from tests.promise.conftest import Outside

MICRO_BATCHES = 4
FILES = {"gpt": gpt, "unet": unet}
# For each stage: values that it receives and passes on, and tied parameters that it shares.
EXPECTED = {
    ("gpt", 2): ((0, 1), (0, 1)),
    ("gpt", 3): ((0, 1), (0, 0), (0, 1)),
    ("unet", 2): ((0, 0), (0, 0)),
    ("unet", 3): ((0, 0), (2, 0), (0, 0)),
}

# Runs in the bundle's folder, where bigbrain-fx cannot be imported.
PROGRAM = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

home, rank, world, kind, store, micro_batches = sys.argv[1:]
rank, world, micro_batches = int(rank), int(world), int(micro_batches)
sys.path.insert(0, home)
from runtime.pipelining import as_pipeline_stage, sum_tied_gradients, take_loss
from runtime.train import run_in_process
from train import BUNDLE

# A foreign loop has no keys for its dice: this test does without them.
torch.nn.functional.dropout = lambda x, *rest, **more: x
plain = torch.nn.functional.scaled_dot_product_attention
torch.nn.functional.scaled_dot_product_attention = (
    lambda *inputs, dropout_p=0.0, **more: plain(*inputs, **more)
)
torch.set_num_threads(1)

want, losses_want = {}, []
run_in_process(
    BUNDLE, 1, 0,
    lambda step, loss, seconds: losses_want.append(loss),
    lambda device, step: want.update({n: g.clone() for n, g in device.first_gradients.items()}),
)

limit = timedelta(seconds=60)
shared = dist.FileStore(store, world)
dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=limit)
cls = BUNDLE.devices[rank]
stage = as_pipeline_stage(BUNDLE.devices, rank, torch.device("cpu"))
inside = stage.submod.stage
weights = load_file(f"{home}/weights/{cls.name}.safetensors")
inside.load_state_dict({name: weights[name] for name in inside.state_dict()})
schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[kind](
    stage, micro_batches, loss_fn=take_loss
)
batch = next(BUNDLE.batches(0))
inputs = {name: batch[key[0]] for name, key in BUNDLE.inputs.items()}
losses, target = [], torch.zeros(micro_batches)
for _ in range(2):  # buffers are used again: the second step must find the same
    stage.submod.zero_grad()
    schedule.step(**inputs, target=target, losses=losses, return_outputs=False)
    sum_tied_gradients(stage)

for name, parameter in inside.named_parameters():
    expected = want[cls.aliases.get(name, name)]
    error = (parameter.grad - expected).abs().max() / expected.abs().max()
    assert error <= 1e-6, (name, error)
if rank == world - 1:
    assert abs(torch.stack(losses).mean().item() - losses_want[0]) <= 1e-6 * losses_want[0]
passed_on = set(stage.submod.incoming) & set(stage.submod.outgoing)
print("ok", len(passed_on), len(stage.submod.tied()))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    made: dict[tuple[str, int], Path] = {}

    def get(name: str, devices: int) -> Path:
        if (name, devices) not in made:
            folder = tmp_path_factory.mktemp(f"{name}{devices}")
            options = Options("naive", schedule="1f1b", micro_batches=MICRO_BATCHES)
            source = Path(str(FILES[name].__file__))
            split = bigbrain_fx.split(source, cluster(devices), folder / "bundle", options)
            made[name, devices] = split.bundle
        return made[name, devices]

    return get


@pytest.mark.parametrize(
    ("name", "devices", "schedule"),
    [("gpt", 2, "1f1b"), ("gpt", 3, "gpipe"), ("unet", 2, "gpipe"), ("unet", 3, "1f1b")],
)
def test_gradients_under_torchs_schedules(
    name: str,
    devices: int,
    schedule: str,
    bundle: Callable[[str, int], Path],
    outside: Outside,
    tmp_path: Path,
    script: Callable[[str], str],
) -> None:
    home, program, store = str(bundle(name, devices)), script(PROGRAM), str(tmp_path / "store")
    rest = [str(devices), schedule, store, str(MICRO_BATCHES)]
    words = [[program, home, str(rank), *rest] for rank in range(devices)]
    found = outside.results(*[outside.start(tmp_path, line) for line in words])
    assert found == [f"ok {relayed} {tied}\n" for relayed, tied in EXPECTED[name, devices]]


def device_of(*numbers: int, loss: bool = False) -> type[Device]:
    """A device class that holds stages of these numbers."""
    held = dict.fromkeys(numbers, Stage)
    made = (numbers[-1], "loss") if loss else None
    return type("D", (Device,), {"name": f"d{numbers[0]}", "stages": held, "loss": made})


def test_a_bundle_that_is_no_chain_is_refused() -> None:
    devices = [device_of(0, 2), device_of(1, loss=True)]
    with pytest.raises(
        ValueError, match="one stage per device, in order, but d0 has 0, 2; d1 has 1"
    ):
        as_pipeline_stage(devices, 0, torch.device("cpu"))


def test_a_chain_without_a_loss_at_its_end_is_refused() -> None:
    devices = [device_of(0, loss=True), device_of(1)]
    with pytest.raises(ValueError, match="the last stage, on d1, makes no loss"):
        as_pipeline_stage(devices, 0, torch.device("cpu"))
