"""The Python API: the verbs of the command line, for people who have a model in memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.bundles import compile as road
from bigbrain_fx.core import Cluster
from tests.support.command_line import files, tiny_bundle, write_cluster, write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.getbasetemp())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=generator)
    return {"x": x, "y": x.flip(1)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().mean()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layers(x))


OPTIONS = bb.Options("naive", micro_batches=2)


# --------------------------------------------------------------------------- a module in memory


def expected_losses(module: nn.Module, steps: int) -> list[float]:
    """Train the module here, on its example batch again and again."""
    optimizer, found = torch.optim.AdamW(module.parameters()), []
    for _ in range(steps):
        value = loss(module(batch()["x"]), batch())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def test_a_module_in_memory_splits_and_trains(tmp_path: Path) -> None:
    module, cluster = Net(), bb.read_cluster(write_cluster(tmp_path))
    made = bb.split(module, cluster, tmp_path / "b", OPTIONS, example_batch=batch(), loss=loss)
    assert made.parameters == sum(p.numel() for p in module.parameters())
    assert made.plan.stages.devices == ("d0", "d1")
    assert made.bundle == tmp_path / "b"
    assert str(made).endswith(f"wrote {tmp_path / 'b'}")
    done = bb.run(made.bundle, bb.RunOptions(steps=3))
    assert [line.loss for line in done.steps] == pytest.approx(expected_losses(module, 3), rel=1e-5)
    with pytest.raises(bb.InputError, match="split from a module in memory"):
        bb.verify(made.bundle)


FAILING = """
def optimizer(named_params):
    return torch.optim.{}
"""


@pytest.mark.gate("LBFGS([p for _, p in named_params])-None")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("AdamW([p for _, p in named_parms])", "NameError: name 'named_parms'"),
        ("Adamm(named_params)", "AttributeError: module 'torch.optim'"),
        ("LBFGS([p for _, p in named_params])", None),  # the whole step is opaque
        ("SGD(named_params, lr=float(abs(list(named_params)[0][1]).sum()))", None),
    ],
)
def test_estimate_refuses_an_optimizer_whose_code_fails(
    tmp_path: Path, made: str, said: str | None
) -> None:
    """It took it for AdamW, and said what that holds."""
    model, devices = write_model(tmp_path), write_cluster(tmp_path)
    model.write_text(model.read_text() + FAILING.format(made))
    if said is None:  # the next one reads numbers, which there are none of here
        assert bb.estimate(model, devices, OPTIONS).forecast.step_s > 0
        return
    with pytest.raises(bb.InputError, match=said):
        bb.estimate(model, devices, OPTIONS)


class FixedSize(nn.Module):
    """Its trace holds for one number of rows only: it reads that number in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        x = x * (0.5 if len(x) > 3 else 2.0)
        return cast("Tensor", self.layers(x.reshape(int(x.shape[0]), 4)))


class OneSize(FixedSize):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(int(float(x.shape[0])), 4)


@pytest.mark.nightly
def test_a_trace_of_fixed_size_is_made_for_the_micro_batches_asked_for(tmp_path: Path) -> None:
    cluster = bb.read_cluster(write_cluster(tmp_path))
    for count in (1, 2, 4):
        options = bb.Options("naive", micro_batches=count)
        plan = bb.estimate(OneSize(), cluster, options, example_batch=batch(), loss=loss)
        assert plan.graph.static_batch == plan.rows == 8 // count


def test_a_trace_of_fixed_size_is_made_for_the_replicas_asked_for(tmp_path: Path) -> None:
    cluster = bb.read_cluster(write_cluster(tmp_path))
    options = bb.Options("naive", replicas=2)
    plan = bb.estimate(OneSize(), cluster, options, example_batch=batch(), loss=loss)
    assert (plan.rows, plan.micro_batches) == (4, 2)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (nn.Linear(4, 4), {}, "a module in memory needs an example batch"),
        (3, {"example_batch": 1}, "expected a model file or a torch.nn.Module, found int"),
        (
            "model.py",
            {"example_batch": 1},
            "a model file defines its own example_batch, loss and optimizer",
        ),
    ],
)
def test_models_that_cannot_be_split(
    tmp_path: Path, model: nn.Module, more: dict[str, object], message: str
) -> None:
    cluster = bb.read_cluster(write_cluster(tmp_path))
    with pytest.raises(bb.InputError, match=message):
        bb.split(model, cluster, tmp_path / "b", **more)  # type: ignore[arg-type]  # that is the test
    assert not (tmp_path / "b").exists()


# --------------------------------------------------------------------------- plans


def test_presets_and_partitioners_are_understood(tmp_path: Path) -> None:
    cluster = bb.read_cluster(write_cluster(tmp_path))
    for name, method in (("analytical", "chain-dp"), ("chain-dp", "chain-dp"), ("naive", "naive")):
        options = bb.Options(name, micro_batches=2)
        plan = bb.estimate(Net(), cluster, options, example_batch=batch(), loss=loss)
        assert plan.partitioner == method
    with pytest.raises(bb.InputError, match="there is no partitioner 'none'"):
        bb.estimate(Net(), cluster, bb.Options("none"), example_batch=batch(), loss=loss)


def test_simulate_here_gives_the_forecast_and_its_timeline(bundle: Path) -> None:
    plan = bb.read_plan(bundle)
    again = bb.simulate(plan)
    assert again.forecast.step_s == plan.forecast.step_s
    found = [replace(entry, held=()) for entry in again.forecast.devices]
    assert found == [*plan.forecast.devices]
    assert again.forecast.timeline
    assert not plan.forecast.timeline


def others(folder: Path, count: int) -> Cluster:
    path = write_cluster(folder, count=count, name="other.json", speed=1)
    return bb.parse_cluster(path.read_text().replace('"name": "d', '"name": "x'), "other.json")


def test_simulate_elsewhere_keeps_the_parts_together(bundle: Path, tmp_path: Path) -> None:
    plan = bb.read_plan(bundle)
    moved = bb.simulate(plan, others(tmp_path, 3))
    assert moved.stages.devices == ("x0", "x1")  # other names: in order
    assert [s.ops for s in moved.stages.stages] == [s.ops for s in plan.stages.stages]
    assert moved.forecast.step_s > plan.forecast.step_s
    same = bb.simulate(plan, bb.read_cluster(write_cluster(tmp_path, count=3)))
    assert same.forecast.step_s == plan.forecast.step_s
    with pytest.raises(bb.InputError, match="parts for 2 devices, the cluster has 1"):
        bb.simulate(plan, others(tmp_path, 1))
    assert bb.simulate(plan, others(tmp_path, 1), again=True).stages.devices == ("x0",)


# --------------------------------------------------------------------------- the example, the names


@pytest.mark.nightly
def test_the_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs/how-to/python-and-notebooks.md").read_text(),
        re.DOTALL,
    )
    (example,) = [block for block in blocks if "import bigbrain_fx" in block]
    assert len(example.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    write_cluster(tmp_path)
    exec(compile(example, "page", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.startswith("forecast ")
    assert (tmp_path / "bundle" / "train.py").is_file()


def test_every_public_name_is_there() -> None:
    for name in bb.__all__:
        assert getattr(bb, name) is not None
    assert set(bb.__all__) <= set(dir(bb))
    with pytest.raises(AttributeError, match="no attribute 'splitt'"):
        _ = bb.splitt  # type: ignore[attr-defined]  # that is the test


def test_verbs_stay_verbs_when_rooms_of_the_same_name_are_imported() -> None:
    code = (
        "import bigbrain_fx, bigbrain_fx.bundles.verifying, bigbrain_fx.plan.explanation\n"
        "import bigbrain_fx.plan.simulate\n"
        "from bigbrain_fx.bundles.verifying import Verification\n"
        "from bigbrain_fx import explain, simulate, verify\n"
        "print(*(f.__qualname__ for f in (explain, simulate, verify, bigbrain_fx.verify)))\n"
        "import sys\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["explain simulate verify verify", "False"]


@pytest.mark.gate("bigbrain_fx", "bigbrain_fx.core")
@pytest.mark.parametrize("name", ["bigbrain_fx", "bigbrain_fx.core", "bigbrain_fx.bundles.compile"])
def test_importing_imports_no_torch(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_limits_agree() -> None:
    from bigbrain_fx.cli.planning import split

    (option,) = [entry for entry in split.params if entry.name == "time_limit"]
    assert option.default == road.TIME_LIMIT_S


@pytest.mark.nightly
def test_out_of_a_folder_that_is_the_working_one(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(shutil.copytree(bundle, tmp_path / "b"))
    (place / "old.txt").write_text("goes")
    monkeypatch.chdir(place)
    model, cluster = bundle.parent / "model.py", bundle.parent / "cluster.json"
    bb.split(model, cluster, ".", bb.Options("naive", micro_batches=4), force=True)
    assert files(place) == files(bundle)


# --------------------------------------------------------------------------- what is copied

CONFIGURED = """
import bigbrain_fx
import torch
from torch import nn

SHIFT = 1.0
HIDDEN = torch.randn(4, 2)


def configure():
    global SHIFT
    SHIFT = 0.25


configure()


def model():
    return nn.Linear(4, 2)


def example_batch():
    return (torch.zeros(2, 4), torch.zeros(2, 2))


def loss(output, batch):
    return (output - batch[1]).square().mean()


def batches(seed):
    while True:
        yield (torch.ones(2, 4), torch.ones(2, 4) @ HIDDEN + SHIFT)
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
def test_a_file_whose_copy_would_be_another_is_taken_whole(tmp_path: Path) -> None:
    """The data are those of the file, as `split` has run it."""
    model = tmp_path / "configured.py"
    model.write_text(CONFIGURED)
    made = bb.split(model, write_cluster(tmp_path), tmp_path / "bundle", OPTIONS)
    said = [text for text in made.warnings if "takes configured.py whole" in text]
    assert said
    assert made.plan.source.ships_file
    text = (tmp_path / "bundle" / "training.py").read_text()
    assert "torch.manual_seed(0)\nfrom configured import batches" in text
    assert "import bigbrain_fx" not in (tmp_path / "bundle" / "configured.py").read_text()
    asked = "import training, torch; torch.save(next(training.batches(0))[1], '../y.pt')"
    subprocess.run([sys.executable, "-c", asked], cwd=made.bundle, check=True)
    torch.manual_seed(0)
    hidden = torch.randn(4, 2)
    assert torch.equal(torch.load(tmp_path / "y.pt"), torch.ones(2, 4) @ hidden + 0.25)


KEPT = """
import torch
from torch import nn

SCALE = float(torch.tensor(2.0))


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def model():
    return Net(4, 2)


def example_batch():
    return {"x": torch.ones(2, 4), "y": torch.ones(2, 2)}


def loss(output, batch):
    if batch["y"].sum() > 0:
        return (output - batch["y"]).square().mean() * SCALE
    return output.square().mean()
"""


def test_a_loss_that_is_kept_is_copied(tmp_path: Path) -> None:
    """The name that it has in a bundle (`user_loss`) is no name of the file that differs."""
    model = tmp_path / "kept.py"
    model.write_text(KEPT)
    made = bb.split(model, write_cluster(tmp_path), tmp_path / "bundle", OPTIONS)
    assert [text[:6] for text in made.warnings] == ["BX0150"]
    assert not made.plan.source.ships_file
    text = (tmp_path / "bundle" / "functions.py").read_text()
    assert "SCALE = float(" in text
    assert text.endswith("\nuser_loss = loss\n")
