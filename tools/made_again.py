"""What it costs to make again what does not fit: single ops, against whole stages.

    python -m tools.made_again [--models gpt,llama,unet] [--shares 0.9,0.8,0.7] [--rounds 3]

Each model is split over two devices under gpipe. Then every device gets a share of its peak as
memory, and `--recompute auto` and `--recompute all` are planned and run, in turns: `forecast` is
busy time, `measured` processor time of all devices in one process, both over the plan that keeps
all; process start is taken off by two numbers of steps. `-`: it does not fit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import click

from bigbrain_fx.core import Cluster
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.recompute import Wanted
from bigbrain_fx.planning.registry import load
from tools.matrix import Bench, parse_cell

FEW, MANY = 2, 12  # steps


@click.command()
@click.option("--models", default="gpt,llama,unet", show_default=True)
@click.option("--shares", default="0.9,0.8,0.7", show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(models: str, shares: str, rounds: int) -> None:
    """Print a row for each model and share."""
    load("partitioner")
    load("estimator")
    click.echo(
        "model    share   auto: forecast measured   all: forecast measured   what auto makes"
    )
    for model in models.split(","):
        bench = Bench.of(model)
        kept = bench.plan(parse_cell(f"{model}/naive/2/gpipe"))
        for share in map(float, shares.split(",")):
            click.echo(_row(bench, kept, share, rounds))


def _row(bench: Bench, kept: Plan, share: float, rounds: int) -> str:
    tight = with_share(kept, share)
    plans = {"kept": kept}
    for wanted in ("auto", "all"):
        found = _planned(kept, tight, wanted)
        plans |= {wanted: found} if found else {}
    took = _measured(bench, plans, rounds)
    cells = [_cells(plans, took, wanted) for wanted in ("auto", "all")]
    auto = plans.get("auto")
    ops = [f"{len(s.again)} ops" if s.again else "" for s in auto.stages.stages] if auto else []
    whole = f"whole stages {auto.stages.recompute}" if auto and auto.stages.recompute else ""
    said = ", ".join(filter(None, (*ops, whole)))
    return f"{bench.captured.graph.name:8} {share:5.2f}  {cells[0]}   {cells[1]}   {said}"


def _cells(plans: Mapping[str, Plan], took: Mapping[str, float], wanted: str) -> str:
    if wanted not in plans:
        return f"{'-':>14} {'-':>8}"
    forecast = _busy_s(plans[wanted]) / _busy_s(plans["kept"])
    return f"{forecast:14.3f} {took[wanted] / took['kept']:8.3f}"


def _busy_s(plan: Plan) -> float:
    return sum(entry.busy_s for entry in plan.forecast.devices)


def with_share(plan: Plan, share: float) -> Cluster:
    """Return a plan's cluster with so much of each device's peak as its memory."""

    def memory(name: str) -> int:
        entry = plan.forecast.of(name)
        less = replace(entry, peak_bytes=int(entry.peak_bytes * share))
        return needed_bytes(less, plan.cluster.device[name])

    devices = (replace(d, memory_bytes=memory(d.name)) for d in plan.cluster.devices)
    return replace(plan.cluster, devices=tuple(devices))


def _planned(kept: Plan, cluster: Cluster, wanted: Wanted) -> Plan | None:
    options = Options("naive", kept.estimator, "gpipe", kept.micro_batches, recompute=wanted)
    try:
        return make_plan(kept.graph, cluster, kept.source, options)
    except NoPlanError:
        return None


def _measured(bench: Bench, plans: Mapping[str, Plan], rounds: int) -> Mapping[str, float]:
    """Return the processor seconds of a step: the median over rounds, all plans in each."""
    with tempfile.TemporaryDirectory(prefix="again-") as scratch:
        folders = {name: write_bundle(p, bench, Path(scratch, name)) for name, p in plans.items()}
        found = [{name: _step_s(f) for name, f in folders.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in found) for name in plans}


def _step_s(folder: Path) -> float:
    few, many = (_processor_s(folder, steps) for steps in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def _processor_s(folder: Path, steps: int) -> float:
    before = os.times()
    command = [sys.executable, "train.py", "--in-process", "--steps", str(steps)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=alone, check=True, capture_output=True, timeout=600)
    after = os.times()
    return sum(_children(after)) - sum(_children(before))


def _children(times: os.times_result) -> Iterator[float]:
    yield from (times.children_user, times.children_system)


if __name__ == "__main__":
    main()
