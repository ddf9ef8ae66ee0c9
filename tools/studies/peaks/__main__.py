"""Forecasts of peak memory beside what was measured: torch's MemTracker, accelerate's rule, ours.

    python -m tools.studies.peaks [--models gpt,moe]

Six models of `models/` train for two steps of four micro-batches with their own optimizer, in one
process. MemTracker (torch.distributed._tools) runs the plain PyTorch loop on fake tensors and is
held against the same loop on real ones; ours is what `estimate` says of a bundle on one device and
is held against that bundle's process. Measured is the peak of live tensor bytes. accelerate's rule
for training with Adam is four times the weights (`commands/estimate.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves, tree_map

from bigbrain_fx.frontend import ModelFile, Step, route, take_apart
from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.planning.registry import load
from tools.conformance.matrix import MICRO_BATCHES, Bench, Cell
from tools.conformance.memory import measure

MODELS = ("gpt", "llama", "resnet", "unet", "encdec", "moe")
STEPS = 2  # the first makes the optimizer's state
_ADAM = 4  # weights, gradients, two moments


@dataclass(frozen=True)
class Peaks:
    """Bytes of one model: forecasts, and what each is a forecast of."""

    model: str
    rule: int
    tracker: int
    loop: int
    ours: int
    bundle: int

    def __str__(self) -> str:
        """Show it as a line of the table."""
        rule, tracker = (_error(one, self.loop) for one in (self.rule, self.tracker))
        sizes = f"{_mib(self.loop)} | {rule} | {tracker} | {_mib(self.bundle)}"
        return f"| {self.model} | {sizes} | {_error(self.ours, self.bundle)} |"


HEAD = """\
| model | loop, MiB | accelerate's rule | MemTracker | bundle, MiB | ours |
|---|---:|---:|---:|---:|---:|"""


def peaks(model: str) -> Peaks:
    """Ask and measure one model."""
    bench = Bench.of(model)
    row = next(measure(bench, Cell(model, "naive", 1, "1f1b"), resident=False))
    weights = sum(p.nbytes for p in bench.file.model.parameters())
    tracker, loop = tracker_bytes(bench.file), loop_bytes(bench.file)
    return Peaks(model, _ADAM * weights, tracker, loop, row.forecast_bytes, row.tracked_bytes)


def tracker_bytes(file: ModelFile) -> int:
    """Return the peak that MemTracker forecasts of the plain loop, without a number computed."""
    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        module = copy.deepcopy(file.model)
    batches = [tree_map(mode.from_tensor, batch) for batch in micro_batches(file)]
    tracker = MemTracker()
    tracker.track_external(module, *tree_leaves(batches))
    with mode, tracker:
        train(file, module, batches)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def loop_bytes(file: ModelFile) -> int:
    """Return the peak of live tensor bytes of the plain loop."""
    module, batches = copy.deepcopy(file.model), micro_batches(file)
    held = [*module.parameters(), *module.buffers(), *tree_leaves(batches)]
    live = LiveBytes()
    live.ignore(held)
    live.taken(_storage_bytes(held))
    with live:
        train(file, module, batches)
    return live.peak


def train(file: ModelFile, module: nn.Module, batches: Sequence[object]) -> None:
    """Train some steps, as a user would write them."""
    module.train()
    optimizer = (file.optimizer or torch.optim.AdamW)(module.named_parameters())
    for _ in range(STEPS):
        for batch in batches:
            _backward(file, module, batch, len(batches))
        if file.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), file.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def _backward(file: ModelFile, module: nn.Module, batch: object, parts: int) -> None:
    """Add the gradients of one part; `step` lives on until MemTracker's hooks have run."""
    apart = take_apart(batch)
    step = Step(module, file.loss, apart, route(module, batch, file.loss is not None))
    loss: Any = step(*(entry.tensor for entry in apart.entries))[0] / parts
    loss.backward()


def micro_batches(file: ModelFile) -> list[object]:
    """Return the parts of the example batch, each in memory of its own."""

    def part(number: int) -> object:
        return tree_map(lambda t: t.chunk(MICRO_BATCHES)[number].clone(), file.example_batch)

    return [part(number) for number in range(MICRO_BATCHES)]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _error(forecast: int, measured: int) -> str:
    return f"{100 * (forecast / measured - 1):+.1f} %"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def table(models: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield HEAD
    for model in models:
        yield str(peaks(model))


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
def main(models: str) -> None:
    """Print a line for each model."""
    torch.set_num_threads(1)
    load("partitioner")  # before a model's folder joins sys.path
    load("estimator")
    for line in table(models.split(",")):
        click.echo(line)


if __name__ == "__main__":
    main()
