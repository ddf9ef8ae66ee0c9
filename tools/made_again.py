"""What it costs to make again what does not fit: single ops, against whole stages.

    python -m tools.made_again [--models gpt,llama,unet] [--shares 0.9,0.8,0.7] [--rounds 4]
    python -m tools.made_again --width 512 --rounds 2 --steps 3

Each model runs on one device under gpipe. Then the device gets a share of its peak as memory, and
`--recompute auto` and `--recompute all` are planned and run, in turns: `forecast` is busy time,
`measured` the median processor time of a step, both over the plan that keeps all. `-`: it does not
fit. A shared machine's processor time varies by a tenth and more: small models need many rounds.
With `--width` the model is a GPT of 4 blocks so wide, 128 tokens, 32 rows a step: where an op takes
longer than Python does to promise it.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import torch

from bigbrain_fx.core import Cluster
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.recompute import Wanted
from bigbrain_fx.planning.registry import load
from bigbrain_fx.runtime import keep_freed_memory
from tools.matrix import Bench, imported, parse_cell
from tools.offloaded import Size, model_file


@click.command()
@click.option("--models", default="gpt,llama,unet", show_default=True)
@click.option("--shares", default="0.9,0.8,0.7", show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--steps", default=10, show_default=True, help="Of each round.")
@click.option("--width", type=click.IntRange(64), help="Of a GPT, in place of --models.")
def main(models: str, shares: str, rounds: int, steps: int, width: int | None) -> None:
    """Print a row for each model and share."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does
    load("partitioner")
    load("estimator")
    click.echo(
        "model    share   auto: forecast measured   all: forecast measured   what auto makes"
    )
    with tempfile.TemporaryDirectory(prefix="again-") as scratch:  # where bundles find the file
        benches = map(Bench.of, models.split(",")) if width is None else [_wide(width, scratch)]
        for bench in benches:
            kept = bench.plan(parse_cell(f"{bench.captured.graph.name}/naive/1/gpipe"))
            for share in map(float, shares.split(",")):
                click.echo(_row(bench, kept, share, rounds, steps))


def _wide(width: int, scratch: str) -> Bench:
    file = load_model_file(model_file(Size(4, width, 128, 32), Path(scratch)))
    return Bench(file, capture(file.model, file.example_batch, file.loss, name="gpt"))


def _row(bench: Bench, kept: Plan, share: float, rounds: int, steps: int) -> str:
    tight = with_share(kept, share)
    plans = {"kept": kept}
    for wanted in ("auto", "all"):
        found = _planned(kept, tight, wanted)
        plans |= {wanted: found} if found else {}
    took = _measured(bench, plans, rounds, steps)
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


def _measured(
    bench: Bench, plans: Mapping[str, Plan], rounds: int, steps: int
) -> Mapping[str, float]:
    """Return the processor seconds of a step: the median of all rounds, all plans in each."""
    with tempfile.TemporaryDirectory(prefix="again-") as scratch:
        folders = {name: write_bundle(p, bench, Path(scratch, name)) for name, p in plans.items()}
        found = [{name: _steps_s(f, steps) for name, f in folders.items()} for _ in range(rounds)]
    return {n: statistics.median(took for each in found for took in each[n]) for n in plans}


def _steps_s(folder: Path, steps: int) -> list[float]:
    """Run the one device in this thread: those of others have heaps that give memory back."""
    at: list[float] = []
    with imported(folder, force_adamw=False) as bundle:
        train = importlib.import_module("runtime.train")
        local = importlib.import_module("runtime.local")
        transport = local.LocalTransport(local.Hub())
        device = train.make_device(bundle.BUNDLE, 0, transport, 0, torch.device("cpu"))
        train.run_steps(device, steps, lambda *_: at.append(time.process_time()), None, 0, None)
    return [end - start for start, end in pairwise(at)]


if __name__ == "__main__":
    main()
