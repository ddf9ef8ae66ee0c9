"""A small vision transformer that is trained and frozen by a schedule, a bundle after another."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

import bigbrain_fx
from bigbrain_fx.bundles import resplit
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, read_plan, with_placement
from tools.conformance.matrix import imported

MODEL = '''"""A small vision transformer that reads scikit-learn's digits, in patches of 2 x 2."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

WIDTH, BLOCKS, HEADS, ROWS = {width}, {blocks}, 4, {rows}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.mix(self.before(x)).view(batch, length, 3 * HEADS, width // HEADS)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images):
        patches = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        x = self.embed(patches) + self.places(torch.arange(16, device=images.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def model():
    return ViT()


def loss(output, batch):
    return F.cross_entropy(output, batch["digits"])


def batches(seed):
    found = load_digits()
    images, digits = torch.tensor(found.images).float() / 16, torch.tensor(found.target)
    dice = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(digits), (ROWS,), generator=dice)
        yield {{"images": images[rows], "digits": digits[rows]}}


def example_batch():
    return next(batches(0))


def optimizer(named):
    return {optimizer}
'''
FROZEN = """

def model():
    made = ViT()
    for name in {names}:
        made.get_submodule(name).requires_grad_(False)
    return made
"""
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(named, lr=1e-3)",
    "SGD": "torch.optim.SGD(named, lr=0.05, momentum=0.9)",
}
MICRO_BATCHES, DEVICES, SKIPPED = 4, 3, 2
SEED = 0


@dataclass(frozen=True)
class Size:
    """Of the model."""

    width: int = 64
    blocks: int = 6
    rows: int = 64


@dataclass(frozen=True)
class Freeze:
    """What trains no more from a step on."""

    step: int
    modules: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Freeze:
        """Read "20:embed,blocks.0-1".

        Raises:
            InputError: it is none.
        """
        step, colon, names = text.partition(":")
        modules = tuple(name.strip() for name in names.split(","))
        if not (step.isdecimal() and colon and all(modules)):
            raise InputError(
                f"expected STEP:MODULES, found {text!r}",
                at="--freeze",
                help="--freeze 20:embed,blocks.0-1",
            )
        return cls(int(step), modules)


def read_schedule(texts: Sequence[str], steps: int) -> tuple[Freeze, ...]:
    """Read a schedule; its steps rise, within the run.

    Raises:
        InputError: they do not.
    """
    found = tuple(Freeze.read(text) for text in texts)
    numbers = [0, *(each.step for each in found), steps]
    if any(a >= b for a, b in pairwise(numbers)):
        raise InputError(
            f"the steps {numbers[1:-1]} of the schedule do not rise to the run's {steps}",
            at="--freeze",
            help="give each step once, in order, and more --steps than the last",
        )
    return found


@dataclass
class Phase:
    """A stretch of the run between two freezings.

    Attributes:
        frozen: all that trains no more, in words.
        kept_cut_s: forecast of a step, had it not been cut anew; None: nothing was frozen.
        losses: of its steps. processor_s: of each, all devices together.
    """

    frozen: str
    plan: Plan
    kept_cut_s: float | None = None
    losses: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Images of a step."""
        return self.plan.graph.batch


def cluster() -> Cluster:
    """Return three alike devices; slow, so that what is computed counts."""
    devices = (Device(f"d{i}", "here", "cpu", 2**32, 2e9, 1e10, 1e-5) for i in range(DEVICES))
    return Cluster(tuple(devices), Link(5e-5, 1e9))


def written(folder: Path, optimizer: str, size: Size = Size(), frozen: str = "") -> Path:
    """Write the model and split it; `frozen` is more of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL.format(**vars(size), optimizer=OPTIMIZERS[optimizer])
    (folder / "vit.py").write_text(text + frozen)
    options = Options("chain-dp", schedule="1f1b", micro_batches=MICRO_BATCHES, seed=SEED)
    return bigbrain_fx.split(folder / "vit.py", cluster(), folder / "bundle", options).bundle


def run_schedule(bundle: Path, schedule: Sequence[Freeze], steps: int) -> tuple[list[Phase], Path]:
    """Train, freezing as the schedule says; return the phases and the last bundle."""
    phases = [Phase("nothing", read_plan(bundle))]
    for number, each in enumerate(schedule):
        _train(phases[-1], bundle, each.step)
        moved = resplit(bundle, cluster(), bundle.parent / f"frozen-{number}", freeze=each.modules)
        before = "" if phases[-1].frozen == "nothing" else f"{phases[-1].frozen}, "
        uncut = replace(phases[-1].plan, graph=moved.plan.graph)
        kept = with_placement(uncut, phases[-1].plan.placement).forecast.step_s
        phases.append(Phase(before + ", ".join(each.modules), moved.plan, kept))
        bundle = moved.bundle
    _train(phases[-1], bundle, steps)
    return phases, bundle


def trained_alone(folder: Path, count: int, size: Size, steps: int) -> Phase:
    """Train the last `count` blocks and what comes after them, from random weights."""
    frozen = ""
    if count < size.blocks:
        first = [f"blocks.{number}" for number in range(size.blocks - count)]
        frozen = FROZEN.format(names=["embed", "places", *first])
    bundle = written(folder, "AdamW", size, frozen)
    phase = Phase("", read_plan(bundle))
    _train(phase, bundle, steps)
    return phase


def _train(phase: Phase, bundle: Path, until: int) -> None:
    """Run all devices of a bundle in this process, from its commits to a step, and commit that."""
    at: list[float] = []
    with imported(bundle, force_adamw=False) as program:
        train = importlib.import_module("runtime.train")
        commits = importlib.import_module("runtime.commit_options").CommitOptions

        def hear(_step: int, loss: float, _seconds: float) -> None:
            at.append(time.process_time())
            phase.losses.append(loss)

        folder = bundle / "commits"
        options = commits(folder, 0, resume=folder.is_dir())
        threads = [1] * len(program.BUNDLE.devices)
        train.run_in_process(program.BUNDLE, until, SEED, hear, commits=options, threads=threads)
    phase.processor_s = [b - a for a, b in pairwise(at)][SKIPPED:]


def weights_of(bundle: Path) -> dict[str, Tensor]:
    """Return the parameters in a bundle's newest commit, by name."""
    newest = max((bundle / "commits").glob("commit-*.json"), key=_number)
    found: dict[str, Tensor] = {}
    for file in sorted((bundle / "commits").glob(f"{newest.stem}-g*/*.safetensors")):
        named = load_file(file).items()
        found |= {n.partition(":")[2]: t for n, t in named if n.startswith("parameter:")}
    return found


def _number(record: Path) -> int:
    return int(record.stem.split("-")[1])
