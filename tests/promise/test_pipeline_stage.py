"""Chain bundles under torch.distributed.pipelining through `as_pipeline_stage`.

GPT has a tied weight on its first and last stage, U-Net has skips that cross every cut, and stages
that run forward again. Losses and gradients of one step are those of the bundle's own runtime,
under both schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bigbrain_fx
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime import Device, Stage
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.pipelining import as_pipeline_stage
from models import gpt, unet
from tests.promise.conftest import NUMPY, Outside
from tests.support.bundles import cluster

MICRO_BATCHES = 4
FILES = {"gpt": gpt, "unet": unet}
DEVICES = 3
# For each stage: values that it receives and passes on, and tied parameters that it shares.
EXPECTED = {
    "gpt": ((0, 1), (0, 0), (0, 1)),
    "unet": ((0, 0), (2, 0), (0, 0)),
}
RECOMPUTE = {"gpt": None, "unet": (0, 1)}

# A foreign loop has no keys for its dice: this test does without them.
WITHOUT_DICE = """
import torch

torch.nn.functional.dropout = lambda x, *rest, **more: x
plain = torch.nn.functional.scaled_dot_product_attention
torch.nn.functional.scaled_dot_product_attention = (
    lambda *inputs, dropout_p=0.0, **more: plain(*inputs, **more)
)
torch.set_num_threads(1)
"""

# The bundle's own runtime, once for all ranks: losses and gradients of one step.
OWN = """
import sys

home, out = sys.argv[1:]
sys.path.insert(0, home)
from runtime.train import run_in_process
from safetensors.torch import save_file
from train import BUNDLE

want, losses = {}, []
run_in_process(
    BUNDLE, 1, 0,
    lambda step, loss, seconds: losses.append(loss),
    lambda device, step: want.update({n: g.clone() for n, g in device.first_gradients.items()}),
)
save_file({**want, "the loss": torch.tensor(losses[0], dtype=torch.float64)}, out)
"""

# Runs where bigbrain-fx cannot be imported.
PROGRAM = """
import sys
from datetime import timedelta

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

home, rank, world, store, micro_batches, expected = sys.argv[1:]
rank, world, micro_batches = int(rank), int(world), int(micro_batches)
sys.path.insert(0, home)
from runtime.pipelining import as_pipeline_stage, sum_tied_gradients, take_loss
from train import BUNDLE

limit = timedelta(seconds=60)
shared = dist.FileStore(store, world)
dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=limit)
cls = BUNDLE.devices[rank]
want = load_file(expected)
loss_want = want["the loss"].item()
weights = load_file(f"{home}/weights/{cls.name}.safetensors")
batch = next(BUNDLE.batches(0))
inputs = {name: batch[key[0]] for name, key in BUNDLE.inputs.items()}

for kind in (Schedule1F1B, ScheduleGPipe):
    stage = as_pipeline_stage(BUNDLE.devices, rank, torch.device("cpu"))
    inside = stage.submod.stage
    inside.load_state_dict({name: weights[name] for name in inside.state_dict()})
    schedule = kind(stage, micro_batches, loss_fn=take_loss)
    losses, target = [], torch.zeros(micro_batches)
    for _ in range(2):  # buffers are used again: the second step must find the same
        stage.submod.zero_grad()
        schedule.step(**inputs, target=target, losses=losses, return_outputs=False)
        sum_tied_gradients(stage)

    for name, parameter in inside.named_parameters():
        gradient = want[cls.aliases.get(name, name)]
        error = (parameter.grad - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-6, (kind, name, error)
    if rank == world - 1:
        error = abs(torch.stack(losses).mean().item() - loss_want)
        assert error <= 1e-6 * loss_want, (kind, error)
    passed_on = set(stage.submod.incoming) & set(stage.submod.outgoing)
    print("ok", len(passed_on), len(stage.submod.tied()))
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXPECTED)
def test_gradients_under_torchs_schedules(
    name: str, outside: Outside, tmp_path: Path, script: Callable[[str], str]
) -> None:
    options = Options(
        "naive", schedule="1f1b", micro_batches=MICRO_BATCHES, recompute=RECOMPUTE[name]
    )
    source = Path(str(FILES[name].__file__))
    target, extras = tmp_path / "bundle", ("pipelining",)
    home = bigbrain_fx.split(source, cluster(DEVICES), target, options, extras=extras).bundle
    expected = str(tmp_path / "expected.safetensors")
    own = outside.start(tmp_path, [script(WITHOUT_DICE + OWN), str(home), expected], NUMPY)
    outside.results(own)  # save_file is its own, and needs numpy
    program, store = script(WITHOUT_DICE + PROGRAM), str(tmp_path / "store")
    rest = [str(DEVICES), store, str(MICRO_BATCHES), expected]
    words = [[program, str(home), str(rank), *rest] for rank in range(DEVICES)]
    found = outside.results(*[outside.start(tmp_path, line, NUMPY) for line in words])
    assert found == [f"ok {relayed} {tied}\n" * 2 for relayed, tied in EXPECTED[name]]


def device_of(*numbers: int, loss: bool = False) -> type[Device]:
    """A device class that holds stages of these numbers."""
    held = dict.fromkeys(numbers, Stage)
    made = (numbers[-1], "loss") if loss else None
    return type("D", (Device,), {"name": f"d{numbers[0]}", "stages": held, "loss": made})


def test_a_bundle_that_is_no_chain_is_refused() -> None:
    devices = [device_of(0, 2), device_of(1, loss=True)]
    with pytest.raises(MisuseError) as found:
        as_pipeline_stage(devices, 0, torch.device("cpu"))
    assert found.value.code == "BX5112"


def test_a_chain_without_a_loss_at_its_end_is_refused() -> None:
    devices = [device_of(0, loss=True), device_of(1)]
    with pytest.raises(MisuseError) as found:
        as_pipeline_stage(devices, 0, torch.device("cpu"))
    assert found.value.code == "BX5113"
