"""What `split` writes is trained beside the model file's own loop before it is in its place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.bundles import rehearsing
from bigbrain_fx.bundles.opaque import with_modules_whole
from bigbrain_fx.frontend import leaf_paths
from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle
from tests.support.bundles import cluster
from tests.support.messages import refused
from tools.conformance.apart import apart
from tools.conformance.forms import find
from tools.conformance.forms.loop import train

pytestmark = pytest.mark.usefixtures("rehearsals")

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        {forward}
        return self.b(torch.relu(self.a(x)) * {factor}).mean()

RATE = [1.0]

def model():
    {model}
    return Net()

def example_batch():
    return torch.ones(4, 8)

def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        {batches}
        yield torch.randn(4, 8, generator=draw)

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

def lr_scale(step):
    return RATE[0]

{rest}
"""
BY_SIZE = """
del lr_scale

def scheduler(optimizer):
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99 ** (step * count))
"""
FIRST = "self.kept = getattr(self, 'kept', self.a.weight.detach().norm())"


def _file(folder: Path, **lines: str) -> Path:
    plain = {"forward": "pass", "factor": "1.0", "model": "pass", "batches": "pass", "rest": ""}
    path = folder / "net.py"
    path.write_text(NET.format(**{**plain, **lines}))
    return path


def _split(path: Path, *, strict: bool = False, rehearse: bool = True) -> bb.Split:
    options = bb.Options("naive", micro_batches=2, strict=strict)
    return bb.split(path, cluster(2), path.parent / "b", options, rehearse=rehearse, force=True)


def test_a_plain_model_is_as_its_loop(tmp_path: Path) -> None:
    made = _split(_file(tmp_path))
    assert made.rehearsed.startswith("3 steps")
    assert not made.plan.graph.is_opaque_step
    assert made.warnings == ()


def test_a_rehearsal_can_be_left_out(tmp_path: Path) -> None:
    assert _split(_file(tmp_path), rehearse=False).rehearsed == ""


@pytest.mark.gate("forward counts its calls")
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param({"model": "RATE[0] = 0.5"}, id="model() sets the rate"),
        pytest.param({"batches": "RATE[0] *= 2.0"}, id="batches() sets the rate"),
        pytest.param(
            {"forward": "self.calls += 1", "factor": "self.calls"}, id="forward counts its calls"
        ),
        pytest.param({"forward": FIRST, "factor": "self.kept"}, id="forward keeps first weights"),
        pytest.param({"rest": BY_SIZE}, id="rates go by how many parameters there are"),
    ],
)
def test_a_step_that_trains_otherwise_runs_as_written(
    tmp_path: Path, lines: dict[str, str]
) -> None:
    path = _file(tmp_path, **lines)
    made = _split(path)
    assert made.plan.graph.is_opaque_step
    with pytest.raises(bb.BigBrainError):
        _split(path, strict=True)
    assert bb.read_plan(tmp_path / "b").graph.is_opaque_step  # the former one is still there


@pytest.mark.nightly
def test_a_module_that_differs_in_a_later_step_runs_as_it_is_written(tmp_path: Path) -> None:
    """Its branch on data turns with the third batch, which no trace has seen."""
    path = tmp_path / "guarded.py"
    path.write_text(find("branch-turns-part").source)
    made = _split(path)
    assert leaf_paths(made.plan.graph) == ("guard",)
    said, other = made.warnings
    assert said.startswith("opaque, on one device: Guard (guard, 31% of the parameters)")
    assert "if h.abs().max() > 30" in said
    assert "2 micro-batches train something else" in other  # it divides by a batch's largest


@pytest.mark.nightly
def test_a_module_that_differs_in_a_later_step_trains_as_its_loop(tmp_path: Path) -> None:
    path = tmp_path / "guarded.py"
    path.write_text(find("branch-turns-part").source)
    with refused("BX3809"):
        _split(path, strict=True)
    made = _split(path)
    losses, _ = train(path, micro_batches=2)

    def run() -> dict[str, str]:
        found = run_bundle(import_bundle(made.bundle), made.plan, len(losses), 0)
        return {"losses": json.dumps([float(loss) for loss in found.losses])}

    ours = json.loads(apart(run, tmp_path)["losses"])  # a fork: it has modules of the bundle's
    assert ours == pytest.approx(losses, rel=1e-6)


def test_a_module_that_differs_though_it_is_opaque_is_given_up(tmp_path: Path) -> None:
    tried: list[str] = []

    def make(apart: Sequence[bb.BigBrainError], _refusal: bb.BigBrainError | None) -> str:
        tried.append(" ".join(f"{error.apart}" for error in apart))
        error = bb.CaptureError("it differs", code="BX3169")
        error.apart = "part" if len(apart) < 2 else "other"
        raise error

    with pytest.raises(bb.CaptureError):
        with_modules_whole(bb.Options(), make, None, is_open=True)
    assert tried == ["", "part"]


def test_a_rehearsal_that_takes_too_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsing, "LIMIT_S", 0.01)
    made = _split(_file(tmp_path))
    assert made.rehearsed == ""
    assert [note for note in made.warnings if "own loop" in note]


# ------------------------------------------------------------------ modules in memory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).mean()


class ByLayout(torch.optim.SGD):
    """Steps ten times as far where a weight is laid out otherwise than it is read."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not p.is_contiguous():
                p.grad.mul_(10.0)
        super().step(closure)


class Shrinking(torch.optim.SGD):
    """Moves weights that have no gradient, too."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.9)
        super().step(closure)


def _in_memory(folder: Path, model: nn.Module, optimizer: object) -> bb.Split:
    recipe = bb.Recipe(optimizer=optimizer)  # type: ignore[arg-type]  # any of a few kinds
    options = bb.Options("naive", micro_batches=2)
    batch = torch.arange(32.0).reshape(4, 8)
    return bb.split(
        model, cluster(2), folder / "b", options, example_batch=batch, recipe=recipe, force=True
    )


def _turned() -> Net:
    model = Net()
    model.a.weight = nn.Parameter(torch.randn(8, 8).t())
    return model


def test_a_module_in_memory_is_as_its_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "train", ModuleType("train"))  # the user has one of that name
    made = _in_memory(tmp_path, Net(), partial(torch.optim.AdamW, lr=0.1))
    assert made.rehearsed.startswith("3 steps")
    assert made.warnings == ()


@pytest.mark.gate("by layout")
@pytest.mark.parametrize(
    ("make", "kind"), [(_turned, ByLayout), (Net, Shrinking)], ids=["by layout", "no gradient"]
)
def test_an_optimizer_that_would_update_otherwise_is_refused(
    tmp_path: Path, make: type[Net], kind: type[torch.optim.SGD]
) -> None:
    with refused("BX3169", bb.CaptureError):
        _in_memory(tmp_path, make(), partial(kind, lr=0.1))
    assert not (tmp_path / "b").exists()


class Chosen(torch.optim.SGD):
    """Not to be made again of its groups: it is given other arguments."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], heads: set[int]) -> None:
        groups: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": []}]
        for _, parameter in named:
            groups[id(parameter) not in heads]["params"].append(parameter)
        super().__init__(groups, lr=0.1)


@pytest.mark.nightly
def test_parameters_chosen_by_the_objects_they_are_are_refused(tmp_path: Path) -> None:
    model = Net()
    heads = {id(p) for p in model.b.parameters()}

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return Chosen(named, heads)

    with refused("BX3169", bb.CaptureError):
        _in_memory(tmp_path, model, make)


@pytest.mark.nightly
def test_weights_of_a_checkpoint_are_those_of_the_loop(tmp_path: Path) -> None:
    names = {"a.weight": (8, 8), "a.bias": (8,), "b.weight": (1, 8), "b.bias": (1,)}
    save_file({n: torch.full(shape, 0.5) for n, shape in names.items()}, tmp_path / "c.safetensors")
    path, options = _file(tmp_path), bb.Options("naive", micro_batches=2)
    made = bb.split(path, cluster(2), tmp_path / "b", options, weights=tmp_path / "c.safetensors")
    assert made.rehearsed.startswith("3 steps")
