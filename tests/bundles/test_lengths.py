"""Batches of several lengths: each keeps its own, or is filled up to the next of `lengths`."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bigbrain_fx as bb
from bigbrain_fx.bundles import verify
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options
from tests.support import warm
from tests.support.bundles import cluster
from tests.support.command_line import write_cluster
from tests.support.messages import refused

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 12  # as long as the longest batch, and no length


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(9, WIDTH), nn.Parameter(torch.zeros(16, WIDTH))
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids, mask):
        rows, length = ids.shape
        x = self.embed(ids) + self.places[:length]
        heads = x.view(rows, length, 2, WIDTH // 2).transpose(1, 2)
        scores = (heads @ heads.transpose(-2, -1)).masked_fill(~mask[:, None, None], -1e9)
        x = x + (scores.softmax(-1) @ heads).transpose(1, 2).reshape(rows, length, WIDTH)
        x = torch.relu(self.one(x.flatten(0, 1)))
        return self.two(x).view(rows, length, 5)


def model():
    torch.manual_seed(0)
    return Net()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        for length in LENGTHS:
            ids = torch.randint(1, 9, (4, length), generator=dice)
            yield {"ids": ids, "mask": ids > 1, "tags": torch.where(ids > 1, ids % 5, -100)}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    return F.cross_entropy(output.transpose(1, 2), batch["tags"])


def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def loss_weight(batch):
    return (batch["tags"] != -100).sum()


LENGTHS = (12, 7, 3, 10)
"""
BUCKETS = """
lengths = (4, 8, 16)
pad = {"ids": 0, "mask": False, "tags": -100}
"""
WITHOUT_BATCHES = """
lengths, first = (8, 12), example_batch()
batches, example_batch = None, first.copy
"""
WITHOUT_OURS = """
import runpy, sys
for name in {{"bigbrain_fx", *(n for n in sys.modules if n.startswith("bigbrain_fx."))}}:
    sys.modules[name] = None  # an import of it fails
sys.path.insert(0, {folder!r})
sys.argv = ["train.py", "--in-process", "--steps", "{steps}", "--save", {saved!r}, "--json"]
runpy.run_path({folder!r} + "/train.py", run_name="__main__")
"""


def write(folder: Path, *more: str) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL + "".join(more))
    return path


def split(folder: Path, *more: str, **options: Any) -> bb.Split:
    how = Options("naive", micro_batches=2, **options)
    return bb.split(write(folder, *more), cluster(), folder / "bundle", how)


def without_ours(bundle: Path, steps: int, saved: Path) -> subprocess.CompletedProcess[str]:
    program = bundle.parent / "without_ours.py"
    program.write_text(WITHOUT_OURS.format(folder=str(bundle), steps=steps, saved=str(saved)))
    return warm.run([sys.executable, str(program)], capture_output=True, text=True)


def run(bundle: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a bundle in a process that has nothing of ours; return losses and weights."""
    saved = bundle.parent / "saved"
    done = without_ours(bundle, steps, saved)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    weights: dict[str, torch.Tensor] = {}
    for file in saved.glob("*.safetensors"):
        weights |= load_file(file)
    return [line["loss"] for line in lines if "loss" in line], weights


def plain(path: Path, steps: int, parts: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model file's batches as they are, in parts that weigh by their labels."""
    spec = importlib.util.spec_from_file_location("plain_lengths", path)
    assert spec is not None
    assert spec.loader is not None
    file: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    net, data, losses = file.model(), file.batches(0), []
    optimizer = file.optimizer([*net.named_parameters()])
    for _, batch in zip(range(steps), data, strict=False):
        optimizer.zero_grad()
        total, whole = 0.0, int(file.loss_weight(batch))
        for part in zip(*(batch[name].chunk(parts) for name in batch), strict=True):
            own = dict(zip(batch, part, strict=True))
            share = file.loss(net(own["ids"], own["mask"]), own)
            share = share * (int(file.loss_weight(own)) / whole)
            share.backward()
            total += float(share.detach())
        optimizer.step()
        losses.append(total)
    return losses, net.state_dict()


def test_each_batch_keeps_its_length_bit_by_bit(tmp_path: Path) -> None:
    with pytest.warns(bb.SplitWarning, match="several lengths, at most 12"):
        made = split(tmp_path)
    assert made.plan.source.lengths["ids"] == ((1, "L12"),)
    assert len(made.plan.stages.devices) == 2
    losses, weights = run(made.bundle, 6)
    want, own = plain(tmp_path / "model.py", 6, parts=2)
    assert losses == pytest.approx(want, rel=1e-6)
    assert all(torch.equal(weights[name], tensor) for name, tensor in own.items())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::bigbrain_fx.SplitWarning")
def test_verify_compares_batches_of_several_lengths(tmp_path: Path) -> None:
    made = split(tmp_path)
    found = {check.name: check.word for check in verify(made.bundle, steps=3).checks}
    assert found.pop("whole batch = micro-batches") == "to rounding"
    assert set(found.values()) == {"equal"}


@pytest.mark.nightly
def test_a_batch_is_filled_up_to_the_next_length_alone(tmp_path: Path) -> None:
    made = split(tmp_path, BUCKETS, "lengths = [16, 8, 4]\n")
    assert made.plan.source.buckets == (4, 8, 16)
    assert [entry.spec.shape for entry in made.plan.graph.inputs] == [("B", "L16")] * 3
    losses, weights = run(made.bundle, 6)
    want, own = plain(tmp_path / "model.py", 6)
    assert losses == pytest.approx(want, rel=1e-5)
    for name, tensor in own.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (f"{BUCKETS}lengths = (4, 8)\n", "BX2203"),
        ("\nlengths = (4, 8, 16)\n", "BX2204"),
        ("\nlengths = (1.5, 8)\n", "BX2205"),
        (WITHOUT_BATCHES, "BX2206"),
    ],
    ids=["a batch is longer", "nothing fills up", "no lengths", "no batches"],
)
def test_lengths_that_do_not_fit_the_batches_are_refused(
    tmp_path: Path, more: str, code: str
) -> None:
    with refused(code, InputError), capture_file(write(tmp_path, more)):
        pass


@pytest.mark.nightly
def test_the_remedies_of_lengths_that_do_not_fit_train(tmp_path: Path) -> None:
    for more in (f"{BUCKETS}lengths = (4, 8, 12)\n", "\nlengths = (3, 7, 10, 12)\n"):
        with capture_file(write(tmp_path, more)) as session:
            assert session.facts.buckets[-1] == 12


def test_a_line_that_goes_by_the_length_keeps_the_trace_to_one(tmp_path: Path) -> None:
    branch = "rows, length = ids.shape\n        if length > 7:\n            ids = ids * 1"
    path = write(tmp_path)
    path.write_text(path.read_text().replace("rows, length = ids.shape", branch))
    options = Options("naive", micro_batches=2, strict=True)
    with pytest.raises(CaptureError) as caught:
        bb.split(path, cluster(), tmp_path / "bundle", options)
    assert caught.value.code == "BX0135"
    assert "model.py:17 goes by the length of a batch" in caught.value.what


@pytest.mark.nightly
def test_a_longer_batch_than_any_that_split_has_seen_stops_the_run(tmp_path: Path) -> None:
    late = "\nLENGTHS = (*[7, 5] * 8, 11)\n"
    with pytest.warns(bb.SplitWarning, match="several lengths, at most 7"):
        made = split(tmp_path, late)
    done = without_ours(made.bundle, 17, tmp_path / "saved")
    assert "BX5209" in done.stderr
    assert "such as 11" in done.stderr
    longest = "next(b for b in batches(0) if b['ids'].shape[1] == 11)"
    remedy = f"\n\ndef example_batch():\n    return {longest}\n"
    with pytest.warns(bb.SplitWarning, match="several lengths, at most 11"):
        made = bb.split(
            write(tmp_path, late, remedy),
            cluster(),
            tmp_path / "again",
            Options("naive", micro_batches=2),
        )
    losses, _ = run(made.bundle, 17)
    assert losses == pytest.approx(plain(tmp_path / "model.py", 17)[0], rel=1e-5)


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(9, 12), torch.nn.Linear(12, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


def tag_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.transpose(1, 2), batch["tags"])


@pytest.mark.nightly
def test_a_loop_of_ones_own_sends_batches_of_several_lengths(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, dice = Tagger(), torch.Generator().manual_seed(0)
    start = copy.deepcopy(net)
    sizes = (4, 8, 6)
    data = [
        {"ids": torch.randint(1, 9, (4, n), generator=dice), "tags": torch.ones(4, n).long()}
        for n in sizes
    ]
    for batch in data:
        batch["tags"][0, 1:] = -100  # so the micro-batches weigh unequally
    how: Any = {
        "loss": tag_loss,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "lengths": (4, 8),
        "pad": {"ids": 0, "tags": -100},
        "loss_weight": lambda batch: (batch["tags"] != -100).sum(),
    }
    machine, options = bb.machine(write_cluster(tmp_path)), Options("naive", micro_batches=2)
    with machine(net, example_batch=data[0], options=options, **how) as session:
        losses = [session.step(batch) for batch in data]
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    for batch, found in zip(data, losses, strict=True):
        optimizer.zero_grad()
        value = tag_loss(start(batch["ids"]), batch)
        value.backward()
        optimizer.step()
        assert found == pytest.approx(value.item(), rel=1e-5)
