"""Forecast against measured step time, with the cluster.json that `doctor` writes here and now.

    python -m tools.forecast [--steps 12] [--json]

The GPT of `tools/bench_peer.py` (8 blocks, d=512, sequence 128, batch 8, 8 micro-batches) on two
CPU devices: cut in the middle, and three unlike splits. Each row is one run of real processes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bigbrain_fx.capture import CaptureSession, capture_file
from bigbrain_fx.compile import source_of
from bigbrain_fx.core import Cluster, Placement
from bigbrain_fx.doctor import probe
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.launch import RunOptions, run
from bigbrain_fx.plan import Options, Plan, make_plan, with_placement

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = 8
MICRO_BATCHES = 8
WARM_UP = 3
SPLITS = ((4, "1f1b"), (2, "1f1b"), (6, "1f1b"), (7, "gpipe"))
MODEL = f'''"""The GPT of tools/bench_peer.py."""
import sys

import torch

sys.path.insert(0, {str(ROOT)!r})
from models.gpt import GPT, loss  # noqa: E402


def model() -> GPT:
    """Build it."""
    return GPT(blocks={BLOCKS}, dim=512, heads=8, sequence=128, vocabulary=2048, dropout=0.0)


def example_batch() -> dict[str, torch.Tensor]:
    """Return random tokens."""
    tokens = torch.randint(0, 2048, (8, 129))
    return {{"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}}
'''


@dataclass(frozen=True)
class Row:
    """One split: how many blocks the first device has, and the seconds of a step."""

    blocks_first: int
    schedule: str
    forecast_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Forecast over measured, less one."""
        return self.forecast_s / self.measured_s - 1


@click.command()
@click.option("--steps", default=12, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(steps: int, as_json: bool) -> None:
    """Print forecast and measured step time of four splits."""
    found = probe(devices=2)
    if not as_json:
        click.echo(str(found))
        click.echo("split   schedule   forecast   measured    error")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.py"
        path.write_text(MODEL)
        with capture_file(path) as session:
            for blocks_first, schedule in SPLITS:
                row = measure(session, found.cluster, blocks_first, schedule, steps)
                click.echo(_line(row, as_json))


def measure(
    session: CaptureSession, cluster: Cluster, blocks_first: int, schedule: str, steps: int
) -> Row:
    """Split as asked, run, and take the median step."""
    plan = split_after(session, cluster, blocks_first, schedule)
    with tempfile.TemporaryDirectory() as scratch:
        bundle = write_bundle(plan, session, Path(scratch) / "bundle")
        done = run(bundle, RunOptions(steps=steps, logs=Path(scratch) / "logs"))
    measured_s = statistics.median(line.step_s for line in done.steps[WARM_UP:])
    return Row(blocks_first, schedule, plan.forecast.step_s, measured_s)


def split_after(
    session: CaptureSession, cluster: Cluster, blocks_first: int, schedule: str
) -> Plan:
    """Plan the split with `blocks_first` blocks on the first device."""
    options = Options("naive", schedule=schedule, micro_batches=MICRO_BATCHES)
    plan = make_plan(session.graph, cluster, source_of(session.facts), options)
    first, second = (device.name for device in cluster.devices)
    early = {"embed", "position", "drop", *(f"blocks.{i}" for i in range(blocks_first))}
    placed = {
        op.name: first if _block(op.module_path) in early else second for op in session.graph.ops
    }
    before_blocks = True  # what stands before the first block without a module of its own
    for op in session.graph.ops:
        before_blocks = before_blocks and not op.module_path.startswith("blocks.")
        if before_blocks:
            placed[op.name] = first
    return with_placement(plan, Placement(placed))


def _block(path: str) -> str:
    return ".".join(path.split(".")[:2]) if path.startswith("blocks.") else path


def _line(row: Row, as_json: bool) -> str:
    if as_json:
        return json.dumps({**asdict(row), "error": row.error})
    split = f"{row.blocks_first}:{BLOCKS - row.blocks_first}"
    return (
        f"{split:>5}   {row.schedule:<8}   {row.forecast_s:6.3f} s   {row.measured_s:6.3f} s   "
        f"{100 * row.error:+5.1f} %"
    )


if __name__ == "__main__":
    main()
