"""Two replicas on the same devices, in reverse: the bits of one process, and of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx
from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, from_json, read_plan, replan, to_json
from bigbrain_fx.verification.imported_bundle import run_bundle
from tests.support.bundles import MODEL
from tests.support.training import (
    APART,
    bench_of,
    cluster,
    planned,
    trained,
    untied,
)
from tools.conformance.forms import FOLDER, loop
from tools.conformance.matrix import Bench, imported

PRELUDE = (FOLDER / "prelude.txt").read_text()
NET = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 8), {norm}, nn.Linear(8, 4)

    def forward(self, x):
        h = torch.cat([self.a(x)] * 3)  # BatchNorm takes a micro-batch of one row, too
        return self.b(torch.tanh(self.n(h).view(3, -1, 8).sum(0)))
"""
CALM = MODEL.replace("nn.Dropout(0.1)", "nn.Identity()")  # a plain loop would draw otherwise


pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


def mirrored(bench: Bench, where: Cluster, **choices: object) -> Plan:
    return planned(bench, where, schedule="gems", **choices)


def plain(bench: Bench, plan: Plan, sums: Sequence[Sequence[int]]) -> tuple[list[float], nn.Module]:
    """Train as anybody would, each list of micro-batches accumulated, and then these added."""
    model = copy.deepcopy(bench.file.model).train()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(list(named.values()))
    losses = []
    assert bench.file.batches is not None
    assert bench.file.loss is not None
    batches: Iterator[Any] = iter(bench.file.batches(plan.seed))
    for step, batch in enumerate(islice(batches, bench.steps)):
        parts = {name: value.chunk(plan.micro_batches) for name, value in batch.items()}
        micros = [{n: v[m] for n, v in parts.items()} for m in range(plan.micro_batches)]
        made: dict[int, float] = {}
        total: dict[str, Tensor] = {}
        for own in sums:
            part: dict[str, Tensor] = {}
            for micro in own:
                loss = bench.file.loss(model(micros[micro]["letters"]), micros[micro])
                found = torch.autograd.grad(loss / plan.micro_batches, list(named.values()))
                made[micro] = float(loss.detach())
                part = added(part, dict(zip(named, found, strict=True)))
            total = added(total, part)
        for name, parameter in named.items():
            parameter.grad = total[name]
        nn.utils.clip_grad_norm_(named.values(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + step)
        optimizer.step()
        losses.append(float(torch.tensor([made[m] for m in sorted(made)]).mean()))
    return losses, model


def added(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: left[name] + g if name in left else g for name, g in right.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("order", "sums"),
    [
        ("replica", ((0, 2, 4, 6), (1, 3, 5, 7))),
        pytest.param("micro", (tuple(range(8)),), marks=pytest.mark.nightly),
    ],
)
def test_gems_computes_as_a_plain_loop(order: str, sums: Sequence[Sequence[int]]) -> None:
    """Even micro-batches, then odd ones, then both together; by number it is plain accumulation."""
    bench = bench_of(CALM.replace(APART, ""))
    plan = mirrored(bench, cluster(1, 1), sum_order=order)
    actual, differs = trained(bench, plan)
    assert differs == ""
    losses, model = plain(bench, plan, sums)
    assert [float(loss) for loss in actual.losses] == losses
    for name, parameter in model.named_parameters():
        assert torch.equal(actual.tensors[name], parameter), name


UNEVEN = """

def batches(seed):
    for step in range(1000):
        yield {name: value[: (8, 7, 3, 1)[step % 4]] for name, value in example_batch().items()}


drop_last = False
"""
SCALED = """

def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


clip_norm, grad_scaler, autocast = 0.5, {"init_scale": 2.0**17, "growth_interval": 2}, "float16"
"""
NORM = "nn.BatchNorm1d(8)"
TRAINED = {
    "smaller batches, running statistics": (UNEVEN, NORM),
    "a loss scale that falls, a scheduler, clipping": (SCALED, "nn.LayerNorm(8)"),
    "a loss scale and smaller batches": (UNEVEN + SCALED, "nn.Identity()"),
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Detected call of")  # the first step is left out, as it is meant
@pytest.mark.parametrize("what", TRAINED)
def test_training_settings_of_a_model_file_go_with_gems(tmp_path: Path, what: str) -> None:
    """Sums by number are those of `tools.conformance.forms.loop`, which imports nothing of ours."""
    said, norm = TRAINED[what]
    path = tmp_path / "net.py"
    path.write_text(f"{PRELUDE}{NET.format(norm=norm)}{said}")
    options = Options("naive", schedule="gems", micro_batches=4, sum_order="micro")
    made = bigbrain_fx.split(path, cluster(1, 1), tmp_path / "bundle", options)
    with imported(made.bundle, force_adamw=False) as bundle:
        actual = run_bundle(bundle, read_plan(made.bundle), loop.STEPS, seed=0)
    losses, tensors = loop.train(path, 4)
    assert [float(each) for each in actual.losses] == pytest.approx(losses, rel=1e-6)
    assert actual.tensors.keys() == tensors.keys()
    assert all(torch.equal(actual.tensors[name], tensors[name]) for name in tensors)


def test_a_plan_is_read_and_made_again(bench: Bench) -> None:
    plan = mirrored(bench, cluster(1, 1, 1, 1))
    assert from_json(to_json(plan), "plan.json").key == plan.key
    again = replan(plan, cluster(1, 1))
    assert (again.schedule, again.stages.devices) == ("gems", ("d0", "d1"))
    other = replan(plan, cluster(1))  # one device has no other's weights to hold
    assert other.schedule != "gems"


def test_devices_and_micro_batches_come_in_pairs(bench: Bench) -> None:
    with pytest.raises(InputError, match="3 devices: one would hold the same weights twice"):
        mirrored(bench, cluster(1, 1, 1))
    with pytest.raises(InputError, match="2 does not divide 1") as caught:
        mirrored(bench, cluster(1, 1), micro_batches=1)
    assert caught.value.help == "use --micro-batches with one of 2, 4, 8"
    for devices, remedy in (
        ((1, 1, 2, 4), "leave --replicas out"),
        ((1, 1, 1, 1, 2, 4), "leave --replicas out, or name groups that are alike"),
    ):
        with pytest.raises(InputError, match="2 groups of devices alike, and these are") as caught:
            mirrored(bench, cluster(*devices), replicas=2)
        assert (caught.value.help or "").partition(' under "')[0] == remedy
    untied_bench = bench_of(untied(MODEL))
    with pytest.raises(InputError, match="--asynchronous does not go with --schedule gems"):
        mirrored(untied_bench, cluster(1, 1), asynchronous="2bw")
