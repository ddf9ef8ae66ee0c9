"""A run goes to plain PyTorch by torch.distributed.checkpoint and comes back, bit for bit."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import bigbrain_fx as bb
from bigbrain_fx.bundles import export_dcp, export_weights, load_weights, resplit
from bigbrain_fx.errors import InputError
from tests.bundles.test_going_on import train
from tests.support.bundles import cluster

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 7)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("table", torch.arange(7.0) / 7, persistent=False)
        self.b = nn.Linear(7, 8)
        self.c = nn.Linear(8, 7)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.norm(torch.tanh(self.a(x))) + self.table))


def model():
    return Net()


def batches(seed):
    for step in range(100):
        dice = torch.Generator().manual_seed(1000 * seed + step)
        yield {"x": torch.randn(4, 8, generator=dice), "y": torch.randn(4, 7, generator=dice)}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    return (output - batch["y"]).square().mean()


def optimizer(named):
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=3e-3,
    )
"""

FSDP = """
import importlib.util, itertools, os, sys, warnings
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def work(rank, meet, file, come, until, go):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    spec = importlib.util.spec_from_file_location("pair", file)
    pair = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pair)
    net = pair.model()
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = pair.optimizer(net.named_parameters())
    model, state = get_state_dict(net, optimizer)
    whole = {"model": model, "optimizer": state, "step": 0}
    dcp.load(whole, checkpoint_id=come)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=whole["optimizer"])
    for step, batch in enumerate(itertools.islice(pair.batches(0), until)):
        if step >= whole["step"]:
            pair.loss(net(batch["x"]), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state, "step": until}, checkpoint_id=go)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort where one of two is taken down first


if __name__ == "__main__":
    meet, file, come, until, go = sys.argv[1:]
    mp.spawn(work, args=(meet, file, come, int(until), go), nprocs=2)
"""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Path:
    """A bundle with its commit of step 3 in `commits`."""
    folder = tmp_path_factory.mktemp("dcp")
    (folder / "pair.py").write_text(MODEL)
    options = bb.Options("naive", micro_batches=1)
    bundle = bb.split(folder / "pair.py", cluster(), folder / "bundle", options).bundle
    train(bundle, 3, "--checkpoint-dir", "commits")
    return bundle


def plain(trained: Path) -> Any:
    found: dict[str, Any] = {}
    exec(compile((trained.parent / "pair.py").read_text(), "pair.py", "exec"), found)
    net = found["model"]()
    return found, net, found["optimizer"](net.named_parameters())


def steps(pair: Mapping[str, Any], net: Any, optimizer: Any, first: int, until: int) -> list[float]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels of two threads sum in another order
    losses = []
    for batch in itertools.islice(pair["batches"](0), first, until):
        loss = pair["loss"](net(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.set_num_threads(before)
    return losses


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.nightly
def test_a_run_goes_on_in_plain_pytorch_and_comes_back(
    trained: Path, tmp_path: Path, flat: bool
) -> None:
    done = export_dcp(trained, tmp_path / "out", commits=trained / "commits")
    assert (done.step, done.warnings) == (3, ())
    pair, net, optimizer = plain(trained)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = get_state_dict(net, optimizer, options=how)
    root = model if flat else {"model": model}  # as torchtitan has it
    whole: dict[str, Any] = {**root, "optimizer": state, "step": 0}
    load(whole, checkpoint_id=tmp_path / "out", no_dist=True)
    found = {"model_state_dict": model, "optim_state_dict": whole["optimizer"]}
    set_state_dict(net, optimizer, **found, options=how)
    assert whole["step"] == 3
    ours = train(trained, 7)
    assert steps(pair, net, optimizer, 3, 5) == ours[3:5]
    model, state = get_state_dict(net, optimizer, options=how)
    counted = {"train_state": {"step": torch.tensor(5)}} if flat else {"step": 5}
    root = model if flat else {"model": model}
    save({**root, "optimizer": state, **counted}, checkpoint_id=tmp_path / "back", no_dist=True)
    back = resplit(trained, cluster(), tmp_path / "new", from_dcp=tmp_path / "back")
    assert back.step == 5
    assert train(back.bundle, 7, "--checkpoint-dir", "commits", "--resume") == ours[5:]


AVERAGED = """

class Averaging(torch.optim.AdamW):
    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for p in [p for group in self.param_groups for p in group["params"]]:
                mean = self.state[p].setdefault("mean", p.detach().clone())
                p.lerp_(mean.lerp_(p.detach(), 0.2), 0.3)


"""
RATES = {
    "scheduler": """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
""",
    "lr_scale": """
def lr_scale(step):
    return 1.0 / (1 + step)
""",
}


def pass_on(folder: Path, program: str, to: str) -> None:
    """Let two processes of FSDP2 load a checkpoint and save it, without a step."""
    (folder / "fsdp.py").write_text(program)
    words = [str(folder / f"meet-{to}"), str(folder / "pair.py"), "out", "3", to]
    command = [sys.executable, "fsdp.py", *words]
    done = subprocess.run(
        command, cwd=folder, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rates", "choices"),
    [
        ("lr_scale", {"replicas": 2, "zero_stage": 1}),
        ("scheduler", {"replicas": 2, "zero_stage": 3}),
        ("scheduler", {"replicas": 2, "zero_stage": 2, "tensor": 2}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nursery")
def test_divided_weights_go_to_fsdp2_and_come_back(
    tmp_path: Path, rates: str, choices: dict[str, int]
) -> None:
    """What the optimizer keeps for itself and a scheduler's rates come, too.

    Where nobody says with which rate it began, that is refused, and a scheduler there helps.
    """
    text = MODEL.replace("torch.optim.AdamW(", "Averaging(") + AVERAGED + RATES[rates]
    groups = "tensor" in choices
    text = text.replace("nn.BatchNorm1d(7)", "nn.LayerNorm(7)") if groups else text
    (tmp_path / "pair.py").write_text(text)
    options = bb.Options("naive", micro_batches=2, sum_order="micro", **choices)  # type: ignore[arg-type]
    devices = cluster(4)
    bundle = bb.split(tmp_path / "pair.py", devices, tmp_path / "bundle", options).bundle
    train(bundle, 3, "--checkpoint-dir", "commits")
    export_dcp(bundle, tmp_path / "out", commits=bundle / "commits")
    pass_on(tmp_path, FSDP, "lacking")
    with pytest.raises(InputError, match=f"has {rates}, and the checkpoint does not say") as caught:
        resplit(bundle, devices, tmp_path / "new", from_dcp=tmp_path / "lacking")
    assert "lr_scheduler there before" in str(caught.value.help)
    assert not (tmp_path / "new").exists()
    made = "    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)\n"
    pass_on(
        tmp_path, FSDP.replace("    model, state = get", made + "    model, state = get", 1), "back"
    )
    back = resplit(bundle, devices, tmp_path / "new", from_dcp=tmp_path / "back")
    found = train(back.bundle, 6, "--checkpoint-dir", "commits", "--resume")
    assert found == train(bundle, 6)[3:]


def test_weights_alone_go_and_come(trained: Path, tmp_path: Path) -> None:
    assert export_dcp(trained, tmp_path / "out").step is None
    _, net, _ = plain(trained)
    wanted = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save({"model": net.state_dict()}, checkpoint_id=tmp_path / "back", no_dist=True)
    bundle = resplit(trained, cluster(), tmp_path / "new", trained / "commits").bundle
    load_weights(bundle, tmp_path / "back")
    export_weights(bundle, tmp_path / "whole.safetensors")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "whole.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(InputError, match="has no optimizer's state by parameter name"):
        resplit(trained, cluster(), tmp_path / "no", from_dcp=tmp_path / "back")
    with pytest.raises(InputError, match="--by-reference"):
        load_weights(bundle, tmp_path / "back", by_reference=True)
    with pytest.raises(InputError, match="exists already"):
        export_dcp(trained, tmp_path / "out")
    assert not (tmp_path / "no").exists()


def test_a_checkpoint_of_another_model_is_refused(trained: Path, tmp_path: Path) -> None:
    _, net, optimizer = plain(trained)
    both: Any = get_state_dict(net, optimizer)
    model, state = both

    def refused(name: str, sentence: str, **whole: Any) -> None:
        save(whole, checkpoint_id=tmp_path / name, no_dist=True)
        with pytest.raises(InputError, match=sentence):
            resplit(trained, cluster(), tmp_path / "new", from_dcp=tmp_path / name)
        assert not (tmp_path / "new").exists()

    by_position = optimizer.state_dict()
    refused("a", "by parameter name", model=model, optimizer=by_position, step=3)
    less = {name: tensor for name, tensor in model.items() if name != "b.bias"}
    refused("b", r"1 of the model's 11 tensors", model=less, optimizer=state, step=3)
    halves = {name: t.half() if t.is_floating_point() else t for name, t in model.items()}
    refused("c", "expected float32, found float16", model=halves, optimizer=state, step=3)
    for own in state["state"].values():
        own["step"].fill_(4)
    refused("d", r"step is 3, the optimizer's 4", model=model, optimizer=state, step=3)
