"""A run that is moved to other devices in the middle, by schedule: the weights of a plain loop."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import bigbrain_fx
from bigbrain_fx.bundles.resplitting import resplit
from bigbrain_fx.core import Cluster, DeviceStore
from bigbrain_fx.frontend import load_model_file
from bigbrain_fx.plan import Options, Plan, make_plan, read_plan, replan
from tests.bundles.resplitting.test_resplit import state, train
from tests.support.bundles import cluster

MODEL = '''"""Scores rows: a line of blocks, wide enough to be cut into eight."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model():
    blocks = (Block() for _ in range(8))
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def batches(seed):
    for step in itertools.count():
        dice = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 6, generator=dice)
        yield {"input": x, "y": torch.randint(5, (16,), generator=dice)}


def example_batch():
    return next(batches(0))


def optimizer(named):
    named = list(named)
    wide = [p for _, p in named if p.dim() > 1]
    flat = [p for _, p in named if p.dim() == 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def lr_scale(step):
    return 1.0 / (1 + step)


clip_norm = 0.5
'''
MICRO, BEFORE, STEPS, SEED = 8, 2, 4, 3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("by_schedule") / "rows.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def plain(file: Path) -> dict[str, torch.Tensor]:
    """Train the model file by hand: no devices, no schedule, one micro-batch after the other."""
    before = torch.get_default_dtype()
    found: Any = load_model_file(file, seed=0)
    net = found.model
    chosen = found.optimizer(list(net.named_parameters()))
    for step, batch in enumerate(islice(found.batches(SEED), STEPS)):
        for m in range(MICRO):
            part = {name: tensor.chunk(MICRO)[m] for name, tensor in batch.items()}
            (found.loss(net(part["input"]), part) / MICRO).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for group in chosen.param_groups:
            group["lr"] = 1e-2 * found.lr_scale(step)
        chosen.step()
        chosen.zero_grad()
    torch.set_default_dtype(before)
    return {name: p.detach() for name, p in net.named_parameters()}


def devices(count: int, folder: Path, *, stores: bool) -> Cluster:
    names = [f"d{i}" for i in range(count)]
    own = tuple(DeviceStore(f"disk-{n}", n, 2**30, 1e15, str(folder)) for n in names)
    return replace(cluster(count), stores=own if stores else ())


def moved(
    file: Path, folder: Path, counts: tuple[int, int], **choices: Any
) -> tuple[Plan, tuple[str, ...], dict[str, torch.Tensor]]:
    """Train on so many devices, then on so many; return the plan, what was said, and weights."""
    stores = bool(choices.get("offload"))
    (folder / "store").mkdir()
    first, then = (devices(n, folder / "store", stores=stores) for n in counts)
    options = Options("naive", micro_batches=MICRO, **choices)
    old = bigbrain_fx.split(file, first, folder / "old", options).bundle
    train(old, BEFORE, "--checkpoint-dir", "commits", "--seed", str(SEED))
    done = resplit(old, then, folder / "new")
    train(done.bundle, STEPS, "--checkpoint-dir", "commits", "--resume")
    tensors, _ = state(done.commits)
    names = [name for name in tensors if name.startswith("parameter:")]
    return read_plan(done.bundle), done.warnings, {n.partition(":")[2]: tensors[n] for n in names}


KEPT: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "zb-v": ((2, 3), {"schedule": "zb-v"}),
    "interleaved": ((4, 2), {"schedule": "interleaved"}),
    "replicas": (
        (4, 2),
        {"schedule": "zb-v", "replicas": 2, "zero_stage": 1, "sum_order": "micro"},
    ),
    "auto": ((2, 3), {"schedule": "auto"}),
    "zb-h1": ((2, 3), {"schedule": "zb-h1", "recompute": "all"}),
    "dualpipe-v": ((4, 2), {"schedule": "dualpipe-v"}),
    "gems": ((2, 4), {"schedule": "gems", "sum_order": "micro"}),
    "state": ((3, 2), {"schedule": "zb-v", "offload": ("state",)}),
    "gpipe": ((2, 3), {"schedule": "gpipe"}),
    "list": ((3, 2), {"schedule": "list", "defer": "all"}),
    "1f1b": ((3, 4), {"schedule": "1f1b", "offload": ("activations", "state")}),
    "weights": ((1, 2), {"offload": ("weights",)}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", KEPT)
def test_a_schedule_goes_along_and_the_weights_are_a_plain_loops(
    file: Path,
    plain: dict[str, torch.Tensor],
    tmp_path: Path,
    name: str,
) -> None:
    counts, choices = KEPT[name]
    plan, said, found = moved(file, tmp_path, counts, **choices)
    assert plan.schedule == choices.get("schedule", "gpipe")
    assert plan.stages.offload == read_plan(tmp_path / "old").stages.offload
    assert not [line for line in said if "schedule" in line]
    assert found.keys() == plain.keys()
    assert [n for n in plain if not torch.equal(found[n], plain[n])] == []


@pytest.fixture(scope="module")
def chain(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder, options = tmp_path_factory.mktemp("chain"), Options("naive", micro_batches=MICRO)
    return bigbrain_fx.split(file, cluster(2), folder / "bundle", options).plan


OTHER = (
    ("interleaved", 1, "goes over several devices"),
    ("zb-v", 1, "goes over several devices"),
    ("dualpipe-v", 5, "at least as many micro-batches as stages, 10"),
    ("gems", 3, "even"),
)


@pytest.mark.parametrize(("schedule", "count", "why"), OTHER)
def test_a_schedule_that_does_not_go_there_is_named_with_the_reason(
    chain: Plan, schedule: str, count: int, why: str
) -> None:
    options = Options("naive", micro_batches=MICRO, schedule=schedule)
    plan, said = make_plan(chain.graph, cluster(2), chain.source, options), list[str]()
    found = replan(plan, cluster(count), say=said.append)
    assert (found.schedule, found.stages.deferring) == ("1f1b", ())
    (line,) = said
    assert line.startswith(f"the schedule is 1f1b now, not {schedule}: ")
    assert why in line
