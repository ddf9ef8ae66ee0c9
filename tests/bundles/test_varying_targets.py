"""Targets of another shape in each batch, which only the loss reads: the model is split."""

from __future__ import annotations

import importlib.util
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import bigbrain_fx as bb
from bigbrain_fx.bundles import verify
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.plan import Options
from tests.support import warm
from tests.support.bundles import cluster
from tests.support.messages import refused

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.boxes, self.kinds = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, images):
        found = torch.relu(self.backbone(images))
        return {"boxes": self.boxes(found).flatten(2), "kinds": self.kinds(found).flatten(2)}


def model():
    torch.manual_seed(0)
    return Detector()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        counts = torch.randint(1, 5, (4,), generator=dice).tolist()
        yield {"images": torch.randn(4, 3, 16, 16, generator=dice), "targets": [
            {"boxes": torch.rand(n, 4, generator=dice), "kinds": torch.arange(n) % 3}
            for n in counts
        ]}


def loss(output, batch):
    total = 0.0
    for row, target in enumerate(batch["targets"]):
        n = len(target["kinds"])
        boxes = output["boxes"][row, :, :n].T
        total = total + F.l1_loss(boxes, target["boxes"], reduction="sum")
        total = total + F.cross_entropy(output["kinds"][row, :, :n].T, target["kinds"])
    return total / sum(len(target["kinds"]) for target in batch["targets"])


def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)
"""
READ_BY_FORWARD = """
class Reads(Detector):
    def forward(self, images, targets):
        return super().forward(images * targets[0]["boxes"].mean())


def model():
    torch.manual_seed(0)
    return Reads()
"""
STEPS = 5


def write(folder: Path, *more: str) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL + "".join(more))
    return path


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("detector_file", path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    return file


def plain_losses(path: Path) -> list[float]:
    file = loaded(path)
    model, data, losses = file.model(), file.batches(0), list[float]()
    optimizer = file.optimizer(model.named_parameters())
    for _ in range(STEPS):
        batch = next(data)
        loss = file.loss(model(batch["images"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_detector_is_split_and_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.warns(bb.SplitWarning, match="the loss is opaque"):
        made = bb.split(path, cluster(), tmp_path / "bundle", Options("naive"), rehearse=True)
    varying = {entry.name for entry in made.plan.graph.inputs if entry.varies}
    assert len(made.plan.stages.devices) > 1
    assert made.plan.micro_batches == 1
    assert len(varying) == 8
    command = [sys.executable, "train.py", "--in-process", "--steps", str(STEPS)]
    ran = warm.run(
        command, cwd=made.bundle, capture_output=True, text=True, timeout=120, check=True
    )
    losses = [float(line.split()[3]) for line in ran.stdout.splitlines() if " loss " in line]
    assert losses[:STEPS] == pytest.approx(plain_losses(path), rel=1e-6)


@pytest.mark.nightly
def test_verify_captures_it_again(tmp_path: Path) -> None:
    made = bb.split(write(tmp_path), cluster(), tmp_path / "bundle", Options("naive"))
    found = {check.name: check.word for check in verify(made.bundle, steps=3).checks}
    assert {word for word in found.values() if word != "not run"} == {"equal"}, found


@pytest.mark.nightly
@pytest.mark.parametrize("options", [Options("naive", strict=True)], ids=["strict"])
def test_nothing_is_opaque_that_was_not_to_be(tmp_path: Path, options: Options) -> None:
    with refused("BX0135", CaptureError):
        bb.split(write(tmp_path), cluster(), tmp_path / "bundle", options)


@pytest.mark.nightly
def test_entries_that_forward_reads_have_one_shape(tmp_path: Path) -> None:
    """Then the whole step is opaque, as before."""
    made = bb.split(write(tmp_path, READ_BY_FORWARD), cluster(), tmp_path / "bundle")
    assert made.plan.graph.is_opaque_step


@pytest.mark.nightly
def test_a_machine_trains_a_module_on_such_batches(tmp_path: Path) -> None:
    path, losses = write(tmp_path), list[float]()
    file = loaded(path)
    data = list(islice(file.batches(0), STEPS))
    with pytest.warns(bb.SplitWarning, match="the loss is opaque") as said:
        bb.machine(cluster()).train(
            file.model(),
            data,
            loss=file.loss,
            optimizer=file.optimizer,
            options=Options("naive"),
            on_step=lambda _, loss: losses.append(loss),
        )
    assert losses == pytest.approx(plain_losses(path), rel=1e-6)
    assert not [each for each in said if "not compared" in str(each.message)]


@pytest.mark.nightly
def test_a_loop_of_ones_own_shows_what_varies(tmp_path: Path) -> None:
    path = write(tmp_path)
    file = loaded(path)
    data = list(islice(file.batches(0), STEPS))
    with (
        pytest.warns(bb.SplitWarning, match="the loss is opaque"),
        bb.machine(cluster())(
            file.model(),
            example_batch=data[0],
            loss=file.loss,
            optimizer=file.optimizer,
            seen=data[:3],
        ) as session,
    ):
        losses = [float(session.step(batch)) for batch in data]
    assert losses == pytest.approx(plain_losses(path), rel=1e-6)
