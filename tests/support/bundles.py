"""A small model with what can go wrong in it, and its bundles, for tests that run them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from bigbrain_fx.bundles.launch import RunOptions
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.plan import Options
from tests.support.cached_bundles import Wanted, split, split_once

MODEL = '''"""Names the letter after five letters; embedding and head share their weight."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(27, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 27, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, letters):
        x = self.embed(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    return Net()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def batches(seed):
    for step in itertools.count():
        dice = torch.Generator().manual_seed(1000 * seed + step)
        rows = torch.randint(27, (8, 6), generator=dice)
        yield {"letters": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def example_batch():
    return next(batches(0))


clip_norm = 0.5


def lr_scale(step):
    return 1.0 / (1 + step)
'''

UNEVEN = """

def batches(seed):
    for step, batch in enumerate(whole_batches(seed)):
        yield {name: value[: %s[step %% 4]] for name, value in batch.items()}


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.05)


drop_last = False
"""


def uneven(text: str, rows: tuple[int, ...] = (8, 7, 3, 1)) -> str:
    """Let a model file give smaller batches, too, and say that they count."""
    own = text.replace("next(batches(0))", "next(whole_batches(0))")
    return own.replace("def batches(seed)", "def whole_batches(seed)") + UNEVEN % (rows,)


HOSTS = ("here",)


def cluster(count: int = 2, hosts: tuple[str, ...] = HOSTS) -> Cluster:
    """Return CPU devices d0, d1, ..., on the hosts in turn."""
    return Cluster(
        tuple(
            Device(f"d{i}", hosts[i % len(hosts)], "cpu", 2**30, 1e10, 1e10, 1e-6)
            for i in range(count)
        ),
        Link(5e-5, 1e9),
    )


def split_small(
    folder: Path,
    devices: Cluster | None = None,
    options: Options | None = None,
    *,
    fresh: bool = False,
    extras: tuple[str, ...] = (),
) -> Path:
    """Write the model file into a folder and its bundle into `folder/bundle`; return the bundle.

    Its plan names a copy of the model file that all tests share. A `fresh` one is split anew from
    the file in the folder, for tests that change or move that.
    """
    chosen = options or Options("naive", schedule="1f1b", micro_batches=4)
    (folder / "letters.py").write_text(MODEL)
    make = split if fresh else split_once
    return make(folder, Wanted("letters.py", MODEL, devices or cluster(), chosen, extras))


def writing_everything(folder: Path, steps: int, *, spares: int) -> RunOptions:
    """Return how users run who want all that a run writes: weights, logs, events, commits."""
    return RunOptions(
        steps,
        spares=spares,
        snapshot_every=1,
        save=folder / "out",
        logs=folder / "logs",
        events=folder / "events.jsonl",
        commits=folder / "commits",
        commit_every=1,
    )


def copied(bundle: Path, folder: Path) -> Path:
    """Copy a bundle, so that a test may break it."""
    return shutil.copytree(bundle, folder / "bundle", ignore=shutil.ignore_patterns("__pycache__"))


def edit(file: Path, old: str, new: str) -> None:
    """Replace the first place in a file; it must be there."""
    text = file.read_text()
    assert old in text, f"{file.name} has no {old!r}"
    file.write_text(text.replace(old, new, 1))


def edit_last(file: Path, old: str, new: str) -> None:
    """Replace the last place in a file; it must be there."""
    text = file.read_text()
    assert old in text, f"{file.name} has no {old!r}"
    file.write_text(new.join(text.rsplit(old, 1)))


def is_running(pid: int) -> bool:
    """Whether a process still runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False
