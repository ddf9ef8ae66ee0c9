"""A run that is moved to other devices, three times: the same numbers, without the model file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bigbrain_fx.bundles.resplitting import Resplit, resplit
from bigbrain_fx.bundles.resplitting.named import read_members
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.core import Cluster
from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.state import State
from bigbrain_fx.verification.reference import Reference
from tests.support import warm
from tests.support.bundles import MODEL, cluster, copied, edit
from tests.support.command_line import call, write_cluster
from tests.support.commit_disks import ABOUT, DEVICES, with_two_commits

OPTIMIZER = """

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
ROUTE = ((4, 3), (3, 5), (2, 7), (4, 9))  # devices, up to which step
ODD = ("torch", "gpu-0", "GPU_0")  # what the three devices are called
SEED = 11


def train(bundle: Path, steps: int, *more: str) -> list[float]:
    """Train all devices of a bundle in one process; return the losses."""
    words = [sys.executable, "train.py", "--in-process", "--json", "--steps", str(steps), *more]
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment = {**plain, "OMP_NUM_THREADS": "1"}
    done = warm.run(
        words,
        cwd=bundle,
        env=environment,
        stdout=warm.PIPE,
        stderr=warm.PIPE,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()]


def named(devices: int) -> Cluster:
    """Return devices d0, d1, ..., or three with names that are hard to make files of."""
    made = cluster(devices)
    if devices != len(ODD):
        return made
    renamed = tuple(replace(d, name=name) for d, name in zip(made.devices, ODD, strict=True))
    return replace(made, devices=renamed)


def state(commits: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors and facts of the newest commit, by name, of all devices."""
    (record, *_) = CheckpointStore(commits).records(print)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, object] = {}
    for device in record.devices:
        found = State.from_buffer(CheckpointStore(commits).load(record, device, {}, print).image)
        tensors.update(found.tensors)
        facts.update(found.facts)
    return tensors, facts


@dataclass(frozen=True)
class Moved:
    """A run along `ROUTE`, and one that was never moved."""

    bundles: tuple[Path, ...]
    losses: tuple[float, ...]
    undisturbed: tuple[float, ...]
    outcomes: tuple[Resplit, ...]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Moved:
    folder = tmp_path_factory.mktemp("moved")
    file = folder / "letters.py"
    file.write_text(MODEL + OPTIMIZER)
    import bigbrain_fx

    options = bigbrain_fx.Options("naive", schedule="1f1b", micro_batches=4)
    first = bigbrain_fx.split(file, cluster(4), folder / "b0", options).bundle
    file.unlink()
    losses = train(first, ROUTE[0][1], "--checkpoint-dir", "commits", "--seed", str(SEED))
    bundles, outcomes = [first], []
    for number, (devices, until) in enumerate(ROUTE[1:], 1):
        done = resplit(bundles[-1], named(devices), folder / f"b{number}")
        losses += train(done.bundle, until, "--checkpoint-dir", "commits", "--resume")
        bundles.append(done.bundle)
        outcomes.append(done)
    undisturbed = train(first, ROUTE[-1][1], "--seed", str(SEED))
    return Moved(tuple(bundles), tuple(losses), tuple(undisturbed), tuple(outcomes))


def batches(bundle: Path, micro_batches: int) -> Iterator[list[Mapping[str, Tensor]]]:
    """Yield the micro-batches of each step, as the model file makes them."""
    names: dict[str, object] = {}
    text = MODEL.split("def batches")[1].split("def example_batch")[0]
    exec("import itertools, torch\ndef batches" + text, names)
    for batch in names["batches"](SEED):  # type: ignore[operator]
        parts = {name: tensor.chunk(micro_batches) for name, tensor in batch.items()}
        yield [{n: p[m].clone() for n, p in parts.items()} for m in range(micro_batches)]


def reference(moved: Moved, folder: Path) -> tuple[list[float], Reference, torch.optim.Optimizer]:
    """Train in one process, in the order of the plan of each bundle in turn."""
    (folder / "letters.py").write_text(MODEL + OPTIMIZER)
    file = load_model_file(folder / "letters.py", seed=0)
    captured = capture(file.model, file.example_batch, file.loss)
    tensors = {name: tensor.detach() for name, tensor in captured.tensors.items()}
    assert file.optimizer is not None
    assert file.lr_scale is not None
    losses: list[float] = []
    before: torch.optim.Optimizer | None = None
    stream = batches(moved.bundles[0], 4)
    for bundle, (_, until) in zip(moved.bundles, ROUTE, strict=True):
        plan = read_plan(bundle)
        made = Reference(plan.graph, plan.stages, tensors, captured.functions)
        chosen = file.optimizer(list(made.parameters.items()))
        if before is not None:
            chosen.load_state_dict(before.state_dict())
        for step in range(len(losses), until):
            loss, gradients = made.gradients(next(stream), SEED, step)
            losses.append(float(loss))
            for name, parameter in made.parameters.items():
                parameter.grad = gradients.get(name)
            torch.nn.utils.clip_grad_norm_(list(made.parameters.values()), file.clip_norm or 0.0)
            for group in chosen.param_groups:
                group["lr"] = 3e-3 * file.lr_scale(step)
            chosen.step()
        before = chosen
        tensors = {**tensors, **{name: p.detach() for name, p in made.parameters.items()}}
        tensors = {p.name: tensors[p.canonical] for p in plan.graph.params}
    assert before is not None
    return losses, made, before


@pytest.mark.nightly
def test_the_moves_lead_over_other_numbers_of_devices(moved: Moved) -> None:
    counts = [len(read_plan(bundle).stages.devices) for bundle in moved.bundles]
    assert counts == [4, 3, 2, 4]
    assert [done.step for done in moved.outcomes] == [3, 5, 7]


@pytest.mark.nightly
def test_a_moved_run_is_the_reference_that_changes_its_plan_bitwise(
    moved: Moved, tmp_path: Path
) -> None:
    losses, trained, optimizer = reference(moved, tmp_path)
    assert list(moved.losses) == losses
    tensors, _ = state(moved.bundles[-1] / "commits")
    for name, parameter in trained.parameters.items():
        assert torch.equal(tensors[f"parameter:{name}"], parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensors[f"optimizer:{key}:{name}"], optimizer.state[parameter][key])


@pytest.mark.nightly
def test_a_moved_run_is_the_undisturbed_one_to_1e_6(moved: Moved) -> None:
    for step in (3, 5, 7):
        assert moved.losses[step] == pytest.approx(moved.undisturbed[step], rel=1e-6)
    assert moved.losses[:3] == moved.undisturbed[:3]


def test_a_new_bundle_has_the_weights_of_the_commit(moved: Moved) -> None:
    from bigbrain_fx.weights import read_checkpoint

    tensors, _ = state(moved.bundles[1] / "commits")
    held = read_checkpoint(moved.bundles[2] / "weights").tensors
    assert {"embed.weight", "blocks.0.up.weight"} <= set(held)
    assert "parameter:embed.weight" in tensors


def test_no_device_gets_more_than_its_own(moved: Moved) -> None:
    bundle = moved.bundles[-1]
    plan = read_plan(bundle)
    (record, *_) = CheckpointStore(bundle / "commits").records(print)
    for device in plan.stages.devices:
        held = {
            plan.graph.param[p].canonical for stage in plan.stages.of(device) for p in stage.params
        }
        found = CheckpointStore(bundle / "commits").load(record, device, {}, print)
        assert {name.split(":")[-1] for name in found.layout.entries} == held


def test_on_the_same_devices_nothing_changes_but_the_names_of_plan_and_run(
    moved: Moved, tmp_path: Path
) -> None:
    bundle = moved.bundles[-1]
    same = resplit(bundle, cluster(4), tmp_path / "same")
    before, facts = state(bundle / "commits")
    after, facts_now = state(same.commits)
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert facts["graph"] == facts_now["graph"]


def test_the_users_changes_stay(moved: Moved, tmp_path: Path) -> None:
    bundle = copied(moved.bundles[0], tmp_path)
    edit(bundle / "train.py", "on_step_end=[]", "on_step_end=[print]")
    edit(bundle / "train.py", "import training\n", "import training  # wie früher: à jamais\n")
    edit(bundle / "training.py", "lr=3e-3", "lr=1e-3")
    (bundle / "helper.py").write_text("HELP = 1\n")
    done = resplit(bundle, cluster(3), tmp_path / "new")
    text = (done.bundle / "train.py").read_text()
    assert "on_step_end=[print]" in text
    assert "import device_d2\n" in text
    assert "device_d3" not in text
    assert "--nproc-per-node 3" in text
    assert f"plan='{done.plan.key}'" in text.replace('"', "'")
    assert "lr=1e-3" in (done.bundle / "training.py").read_text()
    assert (done.bundle / "helper.py").is_file()


def test_files_are_named_after_devices_of_any_name(moved: Moved) -> None:
    files = {path.stem for path in moved.bundles[1].glob("device_*.py")}
    assert files == {f"device_{name}" for name in ("torch", "gpu_0", "gpu_0_2")}


def test_a_module_of_the_users_keeps_its_name(moved: Moved, tmp_path: Path) -> None:
    """It is no device's file, whatever it is called; a device that would need its name is told."""
    bundle = copied(moved.bundles[0], tmp_path)
    (bundle / "device_torch.py").write_text("mine = 1\n")
    done = resplit(bundle, cluster(2), tmp_path / "kept")
    assert (done.bundle / "device_torch.py").read_text() == "mine = 1\n"
    with pytest.raises(InputError, match=r"device_torch\.py, but a bundle has a device_torch"):
        resplit(bundle, named(len(ODD)), tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_the_files_are_those_that_split_writes(moved: Moved, index: int) -> None:
    """What is written without the model file is what is written with it."""
    plan = read_plan(moved.bundles[index])
    texts = bundle_texts(plan, moved.bundles[index])
    for name, text in texts.items():
        assert text == (moved.bundles[index] / name).read_text(), name


OTHER = """
import torch
import torch.nn.functional as F
from torch import nn


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = Twice.apply(torch.tanh(norm(layer(x))))
        return x


def model():
    return Net()


def example_batch():
    dice = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 8, generator=dice), "y": torch.zeros(8, 8)}


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def optimizer(named):
    return torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True)
"""


@pytest.mark.nightly
def test_buffers_and_the_users_functions_go_along(tmp_path: Path) -> None:
    import bigbrain_fx

    (tmp_path / "other.py").write_text(OTHER)
    options = bigbrain_fx.Options("naive", micro_batches=2)
    old = bigbrain_fx.split(tmp_path / "other.py", cluster(3), tmp_path / "old", options).bundle
    (tmp_path / "other.py").unlink()
    undisturbed = train(old, 5)
    train(old, 2, "--checkpoint-dir", "commits")
    done = resplit(old, cluster(2), tmp_path / "new")
    assert (done.bundle / "functions.py").read_text() == (old / "functions.py").read_text()
    losses = train(done.bundle, 5, "--checkpoint-dir", "commits", "--resume")
    assert losses == pytest.approx(undisturbed[2:], rel=1e-6)
    tensors, _ = state(done.commits)
    assert tensors["buffer:norms.3.num_batches_tracked"] == 5 * 2
    assert "optimizer:momentum_buffer:layers.0.weight" in tensors


@pytest.mark.nightly
def test_planning_a_move_imports_no_torch() -> None:
    code = "import sys, bigbrain_fx.bundles.resplitting; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --------------------------------------------------------------------------- refusals


def test_a_bundle_without_commits_is_refused(moved: Moved, tmp_path: Path) -> None:
    bundle = copied(moved.bundles[0], tmp_path)
    shutil.rmtree(bundle / "commits")
    with pytest.raises(InputError, match="commits is not there"):
        resplit(bundle, cluster(2), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_commits_of_another_plan_are_refused(moved: Moved, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="plan: expected "):
        resplit(moved.bundles[0], cluster(2), tmp_path / "new", moved.bundles[3] / "commits")


def test_devices_that_disagree_on_a_tensor_are_refused(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    with pytest.raises(InputError, match="buffer:n of d1 is not what the other devices have"):
        read_members(folder, [DEVICES], {"plan": ABOUT["plan"]})


def test_a_broken_commit_makes_way_for_the_older_one(moved: Moved, tmp_path: Path) -> None:
    bundle = copied(moved.bundles[0], tmp_path)
    (place,) = bundle.glob("commits/commit-3-g*")
    data = bytearray((place / "d1.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "d1.safetensors").write_bytes(data)
    done = resplit(bundle, cluster(2), tmp_path / "new")
    assert done.step == 0
    assert "d1.safetensors: tensor 'parameter:" in done.warnings[0]
    assert "going back to the older checkpoint of step 0" in done.warnings[1]


def test_a_train_py_that_is_no_longer_ours_is_refused(moved: Moved, tmp_path: Path) -> None:
    bundle = copied(moved.bundles[0], tmp_path)
    edit(bundle / "train.py", "BUNDLE = Bundle(", "BUNDLE = dict(")
    with pytest.raises(InputError, match=r"train.py is not as `split` wrote it: .*no Bundle"):
        resplit(bundle, cluster(2), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command(moved: Moved, tmp_path: Path) -> None:
    devices = write_cluster(tmp_path, 2)
    done = call("resplit", moved.bundles[0], "--devices", devices, "-o", tmp_path / "n", "--json")
    assert done.code == 0, done.err
    (found,) = done.objects
    assert found["step"] == 3
    assert len(found["devices"]) == 2
    again = call("resplit", moved.bundles[0], "--devices", devices, "-o", tmp_path / "n")
    assert again.code == 2
    assert "exists already" in again.err


@pytest.mark.nightly
def test_a_moved_bundle_is_verified_with_the_weights_of_its_step(
    moved: Moved, tmp_path: Path
) -> None:
    """The model file's own numbers are those of step 0: they are not asked for."""
    (tmp_path / "letters.py").write_text(MODEL + OPTIMIZER)
    found = verify(moved.bundles[1], steps=2, model=str(tmp_path / "letters.py"))
    assert found.passed, str(found)
    (check,) = [check for check in found.checks if check.name == "weights fit your model"]
    assert f"those of step {ROUTE[0][1]} of a run" in check.detail
