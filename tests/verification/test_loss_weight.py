"""Micro-batches that weigh by `loss_weight` train what a plain loop over whole batches trains."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import bigbrain_fx as bb
from bigbrain_fx.runtime import LossWeight
from bigbrain_fx.runtime.stream import BatchError
from tests.support.bundles import cluster

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

LENGTHS = {lengths}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embed(x))))


def model():
    torch.manual_seed(1)
    return Tagger()


def of_step(step):
    dice = torch.Generator().manual_seed(step)
    tags = torch.randint(5, (8, 6), generator=dice)
    for row, length in enumerate(LENGTHS):
        tags[row, length:] = -100
    return {{"x": torch.randint(9, (8, 6), generator=dice), "tags": tags}}


def example_batch():
    return of_step(0)


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["tags"].flatten())


def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.5, momentum=0.9)
"""
BATCHES = """

def batches(seed):
    step = 0
    while True:
        yield of_step(step)
        step += 1
"""
WEIGHT = """

def loss_weight(batch):
    return (batch["tags"] != -100).sum()
"""
UNEQUAL, WITH_EMPTY = (1, 6, 2, 5, 1, 1, 6, 4), (6, 6, 0, 0, 1, 2, 6, 4)
STEPS = 4


def write(folder: Path, lengths: tuple[int, ...], *more: str) -> Path:
    path = folder / "tagger.py"
    path.write_text(MODEL.format(lengths=lengths) + "".join(more))
    return path


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tagger_of_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(path: Path) -> list[float]:
    """Train on whole batches, as the file's user would."""
    file: Any = loaded(path)
    net, found = file.model(), []
    optimizer = file.optimizer(list(net.named_parameters()))
    data: Iterator[Any] = (
        file.batches(0) if hasattr(file, "batches") else iter(lambda: file.example_batch(), None)
    )
    for _, batch in zip(range(STEPS), data, strict=False):
        value = file.loss(net(batch["x"]), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


@pytest.mark.parametrize(
    ("lengths", "data"),
    [
        (WITH_EMPTY, BATCHES),
        pytest.param(UNEQUAL, "", marks=pytest.mark.nightly),
        pytest.param(WITH_EMPTY, "", marks=pytest.mark.nightly),
        pytest.param(UNEQUAL, BATCHES, marks=pytest.mark.nightly),
    ],
    ids=["empty, batches", "unequal", "empty", "unequal, batches"],
)
def test_a_bundle_trains_what_whole_batches_train(
    tmp_path: Path, lengths: tuple[int, ...], data: str
) -> None:
    path = write(tmp_path, lengths, data, WEIGHT)
    made = bb.split(path, cluster(), tmp_path / "bundle", bb.Options("naive", micro_batches=4))
    assert made.plan.source.has_loss_weight
    assert made.warnings == ()
    done = bb.run(made.bundle, bb.RunOptions(steps=STEPS))
    assert [line.loss for line in done.steps] == pytest.approx(plain_losses(path), rel=1e-5)
    found = bb.verify(made.bundle, steps=STEPS)
    assert found.passed
    assert found.checks[-1].name == "whole batch = micro-batches"
    assert found.checks[-1].word == "to rounding"


def test_without_a_weight_one_micro_batch_is_planned(tmp_path: Path) -> None:
    path = write(tmp_path, UNEQUAL, BATCHES)
    slow = replace(cluster(), devices=tuple(replace(d, flops_per_s=1e6) for d in cluster().devices))
    with pytest.warns(bb.SplitWarning, match="loss_weight"):
        made = bb.split(path, slow, tmp_path / "open", bb.Options("naive"))
    assert made.plan.micro_batches == 1


@pytest.mark.nightly
def test_micro_batches_that_are_asked_for_without_a_weight_differ(tmp_path: Path) -> None:
    path = write(tmp_path, UNEQUAL, BATCHES)
    asked = bb.Options("naive", micro_batches=4)
    with pytest.warns(bb.SplitWarning, match="loss_weight"):
        made = bb.split(path, cluster(), tmp_path / "asked", asked)
    assert made.plan.micro_batches == 4
    found = bb.verify(made.bundle, steps=1)
    assert found.passed
    assert found.checks[-1].word == "differs"


@pytest.mark.nightly
def test_replicas_weigh_by_the_count_of_the_whole_batch(tmp_path: Path) -> None:
    path = write(tmp_path, UNEQUAL, BATCHES, WEIGHT)
    options = bb.Options("naive", micro_batches=4, replicas=2, sum_order="micro")
    made = bb.split(path, cluster(4), tmp_path / "bundle", options)
    done = bb.run(made.bundle, bb.RunOptions(steps=STEPS))
    assert [line.loss for line in done.steps] == pytest.approx(plain_losses(path), rel=1e-5)
    assert bb.verify(made.bundle, steps=2).passed


@pytest.mark.nightly
def test_a_session_weighs_what_it_is_sent(tmp_path: Path) -> None:
    path = write(tmp_path, UNEQUAL, BATCHES, WEIGHT)
    file: Any = loaded(path)
    session = bb.machine(cluster())(
        file.model(),
        example_batch=file.example_batch(),
        loss=file.loss,
        optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        loss_weight=file.loss_weight,
        options=bb.Options("naive", micro_batches=4),
    )
    with session:
        pairs = zip(range(STEPS), file.batches(0), strict=False)
        found = [session.step(batch) for _, batch in pairs]
    assert found == pytest.approx(plain_losses(path), rel=1e-5)


# --------------------------------------------------------------------------- the runtime's part


def test_entries_are_cut_as_their_graph_reads_them() -> None:
    batch = {
        "by_row": torch.arange(8.0),
        "by_column": torch.arange(16.0).view(2, 8),
        "whole": torch.ones(8),
        "pair": (torch.ones(8, 3), "text"),
    }
    seen: list[dict[str, Any]] = []

    def count(part: dict[str, Any]) -> Tensor:
        seen.append(part)
        return part["by_row"].sum()

    weigh = LossWeight(count, dims={("by_column",): 1, ("whole",): None})
    assert weigh.counts(batch, 8, 4, 0) == (1.0, 5.0, 9.0, 13.0)
    assert [tuple(part["by_column"].shape) for part in seen] == [(2, 2)] * 4
    assert [len(part["whole"]) for part in seen] == [8] * 4
    assert [len(part["pair"][0]) for part in seen] == [2] * 4


@pytest.mark.parametrize(
    "count", [lambda _: torch.ones(2), lambda _: -1, lambda _: float("nan"), lambda _: 0]
)
def test_a_batch_that_weighs_no_number_ends_the_step(count: Any) -> None:
    with pytest.raises(BatchError) as caught:
        LossWeight(count).counts({"x": torch.ones(4)}, 4, 2, 7)
    assert "step 7" in str(caught.value)
