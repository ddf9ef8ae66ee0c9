"""Forecast against measured step time, with the cluster.json that `doctor` writes here and now.

    python -m tools.forecast [--steps 12] [--db profiles.sqlite] [--json]

The GPT of `tools/bench_peer.py` (8 blocks, d=512, sequence 128, batch 8, 8 micro-batches) on two
CPU devices: cut in the middle, and three unlike splits. Each row is one run of real processes,
forecast twice: by the estimator `analytical`, and by `measured` from profiles of this host's ops.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.core import Cluster, Placement
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.measure.host import probe
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.plan import Options, Plan, make_plan, measured_share, with_placement

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = 8
ROWS = 8
MICRO_BATCHES = 8
ESTIMATORS = ("analytical", "measured")
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
    tokens = torch.randint(0, 2048, ({ROWS}, 129))
    return {{"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}}
'''


@dataclass(frozen=True)
class Row:
    """One split: how many blocks the first device has, and the seconds of a step.

    `forecast_s` is by estimator; `covered` is the share of the ops' time that was profiled.
    """

    blocks_first: int
    schedule: str
    measured_s: float
    forecast_s: Mapping[str, float]
    covered: float

    @property
    def ratio(self) -> Mapping[str, float]:
        """Forecast over measured, by estimator."""
        return {name: said_s / self.measured_s for name, said_s in self.forecast_s.items()}


@click.command()
@click.option("--steps", default=12, show_default=True)
@click.option("--db", type=click.Path(path_type=Path), help="Keep the profiles here.")
@click.option("--json", "as_json", is_flag=True)
def main(steps: int, db: Path | None, as_json: bool) -> None:
    """Print forecast and measured step time of four splits."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.py"
        path.write_text(MODEL)
        store = (db or Path(scratch) / "profiles.sqlite").resolve()
        os.environ["BIGBRAIN_PROFILES"] = str(store)
        profiled = profile(path, store, ProfileOptions(rows=(ROWS // MICRO_BATCHES,), device="cpu"))
        found = probe(devices=2, kind="cpu")
        if not as_json:
            click.echo(f"{found}\n" + "\n".join(map(str, profiled.measured)))
            click.echo("split   schedule   measured   " + "   ".join(map(_head, ESTIMATORS)))
        with capture_file(path) as session:
            rows = [measure(session, found.cluster, *split, steps, as_json) for split in SPLITS]
    for name in ESTIMATORS:
        errors = [abs(row.ratio[name] - 1) for row in rows]
        mape, worst = statistics.fmean(errors), max(errors)
        summary = {"estimator": name, "mape": mape, "worst": worst}
        text = f"{name}: mean error {100 * mape:.1f} %, worst {100 * worst:.1f} %"
        click.echo(json.dumps(summary) if as_json else text)


def measure(
    session: CaptureSession,
    cluster: Cluster,
    blocks_first: int,
    schedule: str,
    steps: int,
    as_json: bool,
) -> Row:
    """Split as asked, run, take the median step, and show the row."""
    plans = {
        name: split_after(session, cluster, blocks_first, schedule, name) for name in ESTIMATORS
    }
    row = Row(
        blocks_first,
        schedule,
        median_step_s(plans["measured"], session, steps),
        {name: plan.forecast.step_s for name, plan in plans.items()},
        measured_share(plans["measured"]) or 0.0,
    )
    click.echo(_line(row, as_json))
    return row


def median_step_s(plan: Plan, session: CaptureSession, steps: int) -> float:
    """Run a plan as real processes; return the median of its steps after the first few."""
    with tempfile.TemporaryDirectory() as scratch:
        bundle = write_bundle(plan, session, Path(scratch) / "bundle")
        done = run(bundle, RunOptions(steps=steps, logs=Path(scratch) / "logs"))
    return statistics.median(line.step_s for line in done.steps[WARM_UP:])


def split_after(
    session: CaptureSession, cluster: Cluster, blocks_first: int, schedule: str, estimator: str
) -> Plan:
    """Plan the split with `blocks_first` blocks on the first device."""
    options = Options("naive", estimator, schedule=schedule, micro_batches=MICRO_BATCHES)
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


def _head(estimator: str) -> str:
    return f"{estimator:<18}"


def _line(row: Row, as_json: bool) -> str:
    if as_json:
        return json.dumps({**asdict(row), "ratio": row.ratio})
    split = f"{row.blocks_first}:{BLOCKS - row.blocks_first}"
    said = "   ".join(
        f"{row.forecast_s[name]:6.3f} s ({row.ratio[name]:5.3f})  " for name in ESTIMATORS
    )
    return f"{split:>5}   {row.schedule:<8}   {row.measured_s:6.3f} s   {said}"


if __name__ == "__main__":
    main()
