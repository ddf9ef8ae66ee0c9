"""What a step costs whose activations, state or weights lie in a store, and what memory it takes.

    python -m tools.offloaded --offload activations [--blocks 4] [--width 512] [--tokens 128]
    python -m tools.offloaded --offload weights --blocks 8,64

A GPT like `models/gpt.py` on one device, planned twice: with `--offload`, and with what that is
held against (the same plan without; of weights that of `--recompute all`). Each bundle runs in a
process of its own, in turns, a step each, in changing order. `ratio` is the median of the rounds'
quotients of processor time; a round that others disturbed shows in the quartiles. `live` is the
peak in tensors that are alive, in a run of its own; `resident` that of the process that was timed,
with all that it has imported.
"""

from __future__ import annotations

import importlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from bigbrain_fx.core import Offloaded
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan.offloading import read_offload
from bigbrain_fx.plan.recompute import Wanted
from bigbrain_fx.planning.registry import load
from bigbrain_fx.runtime import keep_freed_memory
from bigbrain_fx.supervisor import uncached
from tools.live_bytes import tracked_bytes
from tools.matrix import ROOT, Bench, Cell, imported

WARM_UP = 2  # steps: the first make rooms, the optimizer's state and what modules keep


@dataclass(frozen=True)
class Size:
    """A GPT's."""

    blocks: int
    width: int
    tokens: int
    rows: int


def model_file(size: Size, folder: Path) -> Path:
    """Write models/gpt.py with other numbers."""
    text = (ROOT / "models" / "gpt.py").read_text()
    numbers = {
        "BLOCKS": size.blocks,
        "DIM": size.width,
        "HEADS": max(1, size.width // 64),
        "SEQUENCE": size.tokens,
        "BATCH": size.rows,
        "DROPOUT": 0.0,
    }
    for name, number in numbers.items():
        text, count = re.subn(rf"(?m)^{name} = \S+", f"{name} = {number!r}", text)
        assert count == 1, f"models/gpt.py has {count} lines {name} = ..."
    path = folder / f"gpt_{size.blocks}.py"
    path.write_text(text)
    return path


def bundles(
    size: Size, offload: tuple[Offloaded, ...], schedule: str, scratch: Path
) -> tuple[Path, Path]:
    """Write the bundle without `--offload` and the one with it; return their folders."""
    file = load_model_file(model_file(size, scratch))
    captured = capture(file.model, file.example_batch, file.loss, name="gpt")
    recompute: Wanted = "all" if "weights" in offload else None
    cell = Cell("gpt", "naive", 1, schedule)
    without = Bench(file, captured, recompute=recompute)
    found = Bench(file, captured, recompute=recompute, offload=offload)
    names = ("without", "offloaded")
    made = [
        write_bundle(bench.plan(cell), bench, scratch / f"{name}_{size.blocks}")
        for name, bench in zip(names, (without, found), strict=True)
    ]
    return made[0], made[1]


@dataclass(frozen=True)
class Side:
    """A bundle's process, which runs a step when it is told to."""

    process: subprocess.Popen[str]

    @staticmethod
    def of(folder: Path) -> Side:
        """Start it."""
        words = [sys.executable, "-m", "tools.offloaded", "--side", str(folder)]
        pipe, around = subprocess.PIPE, uncached(folder, os.environ)  # as `run` starts it
        made = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=around)
        return Side(made)

    def step_s(self) -> float:
        """Have it run a step; return the processor seconds that it took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("step", file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def end(self) -> int:
        """Let it end; return the most bytes that it had in memory."""
        return int(self.process.communicate()[0] or 0)


def be_a_side(folder: Path) -> None:
    """Run a step of a bundle's only device for each line that is read; write its seconds."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does
    with imported(folder, force_adamw=False) as bundle:
        train = importlib.import_module("runtime.train")
        local = importlib.import_module("runtime.local")
        transport = local.LocalTransport(local.Hub())
        device = train.make_device(bundle.BUNDLE, 0, transport, 0, torch.device("cpu"))
        for step, _ in enumerate(sys.stdin):
            start = time.process_time()
            device.run_step(step)
            print(time.process_time() - start, flush=True)
    print(peak_bytes())


@dataclass(frozen=True)
class Taken:
    """What the steps of two bundles took: seconds of each round, and the most bytes in memory."""

    rounds: list[tuple[float, float]]
    resident_bytes: tuple[int, int]


def peak_bytes() -> int:
    """Return the most that this process has had in memory; `ru_maxrss` knows its parent's, too."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def in_turns(folders: tuple[Path, Path], count: int) -> Taken:
    """Run both bundles, a step each, in changing order; the first steps do not count."""
    without, offloaded = (Side.of(folder) for folder in folders)
    found = []
    for step in range(count + WARM_UP):
        if step % 2:
            took = without.step_s(), offloaded.step_s()
        else:
            last = offloaded.step_s()
            took = without.step_s(), last
        found.append(took)
    return Taken(found[WARM_UP:], (without.end(), offloaded.end()))


def row(size: Size, offload: tuple[Offloaded, ...], schedule: str, count: int) -> str:
    """Measure both bundles of a size."""
    with tempfile.TemporaryDirectory(prefix="offloaded-") as scratch:
        folders = bundles(size, offload, schedule, Path(scratch))
        taken = in_turns(folders, count)
        live = [tracked_bytes(f, Path(scratch, f"{f.name}-tracked"))["d0"] for f in folders]
    ratios = [offloaded / without for without, offloaded in taken.rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = [statistics.median(each) for each in zip(*taken.rounds, strict=True)]
    return (
        f"{size.blocks:6} {seconds[0]:9.3f} {seconds[1]:9.3f}  {middle:6.3f} "
        f"({low:.3f} to {high:.3f})  {_mib(live)}  {_mib(taken.resident_bytes)}"
    )


def _mib(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / 2**20:8.1f}" for size in sizes)


@click.command(help=__doc__)
@click.option("--offload", default="activations", show_default=True)
@click.option("--blocks", default="4", show_default=True, help="Several with a comma.")
@click.option("--width", default=512, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--rows", default=4, show_default=True, help="Of a step: one a micro-batch.")
@click.option("--schedule", default="gpipe", show_default=True)
@click.option("--rounds", "count", default=16, show_default=True, type=click.IntRange(2))
@click.option("--side", type=click.Path(path_type=Path), hidden=True)
def main(
    offload: str,
    blocks: str,
    width: int,
    tokens: int,
    rows: int,
    schedule: str,
    count: int,
    side: Path | None,
) -> None:
    """Print a row for each number of blocks."""
    if side is not None:
        be_a_side(side)
        return
    load("partitioner")
    load("estimator")
    words = read_offload(offload)
    click.echo(
        "without, offloaded: processor seconds of a step, ratio (quartiles), MiB live, resident"
    )
    for each in blocks.split(","):
        click.echo(row(Size(int(each), width, tokens, rows), words, schedule, count))


if __name__ == "__main__":
    main()
