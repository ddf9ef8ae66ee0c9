"""Fit shares on published rows: each card's, and those of families of ops.

    python -m tools.studies.published_gpus.fitting --data DIR [--rounds 3]

It prints what goes into `bigbrain_fx/cluster/cards.py` and `estimators/cuda_rules.py` by hand.
Like ops of a graph are priced once, so that a row takes milliseconds; a step is what the simulator
makes of one device: where its GPU and its process are both done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from pathlib import Path
from statistics import fmean

import click

from bigbrain_fx.cluster import PRESETS
from bigbrain_fx.core import Device, Graph, TensorSpec
from estimators.analytical import family, rule_of
from estimators.calls import GraphScope, PricedCall
from estimators.cuda_clock import CudaClock
from estimators.cuda_rules import FITTED, Fitted
from estimators.op_rules import OPTIMIZER_TOUCHES, OpRule
from tools.bench.published_gpus.forecasts import cluster_of
from tools.bench.published_gpus.graphs import FOLDER, read_graphs
from tools.bench.published_gpus.rows import Row, data_folder, read_rows, wanted

Shares = Mapping[tuple[str, str], float]
"""By card and "fp32", "tf32", "half" or "memory"."""


@dataclass(frozen=True)
class Counted:
    """Alike calls of a graph, and how many."""

    call: PricedCall
    rule: OpRule
    name: str
    count: int


@dataclass(frozen=True)
class Priced:
    """A row with the calls of a micro-batch, and the bytes of what is trained."""

    row: Row
    calls: Sequence[Counted]
    device: Device
    trained_bytes: int

    def step_s(self, device: Device, fitted: Fitted) -> float:
        """Return the seconds of a step."""
        gpu_s = host_s = 0.0
        runs = 2 if self.row.recompute else 1
        for each in self.calls:
            clock = CudaClock(each.call, each.rule, each.name, device, fitted, self.row.fused)
            own_s, started_s = runs * clock.forward_s(), runs * clock.host_forward_s()
            if each.call.op.requires_grad:
                own_s += clock.inputs_backward_s() + clock.weights_backward_s()
                own_s += clock.fan_out_s()
                started_s += clock.host_backward_s()
            gpu_s += each.count * own_s
            host_s += each.count * started_s
        return max(gpu_s, host_s) * self.row.accum + self._optimizer_s(device)

    def _optimizer_s(self, device: Device) -> float:
        if not self.row.with_optimizer or self.row.key.task == "infer":
            return 0.0
        shared = self.row.gpus if self.row.parallelism == "FSDP" else 1
        return OPTIMIZER_TOUCHES * self.trained_bytes / device.memory_bytes_per_s / shared


def counted(graph: Graph) -> list[Counted]:
    """Return a concrete graph's calls, alike ones together."""
    scope, number = GraphScope(graph), Counter[object]()
    found: dict[object, PricedCall] = {}
    for call in scope.calls():
        if call.op.body is not None or (not call.op.outputs and not call.op.mutates):
            continue
        key = _alike(call)
        number[key] += 1
        found.setdefault(key, call)
    return [
        Counted(call, rule_of(call.op), family(call.op.target), number[key])
        for key, call in found.items()
    ]


def _alike(call: PricedCall) -> object:
    def spec(found: TensorSpec | None) -> object:
        return found and (found.shape, found.dtype, found.requires_grad)

    op = call.op
    values = tuple(spec(one) for _, one in call.values)
    params = tuple(spec(call.scope.param(name)) for name in op.params)
    fan_out = call.scope.gradients_into(op.name)
    flags = op.args[5] if "attention" in op.target and len(op.args) > 5 else None
    return (
        op.target,
        op.requires_grad,
        op.view_of is None,
        values,
        params,
        fan_out,
        flags,
        op.outputs,
    )


def priced(rows: Sequence[Row]) -> list[Priced]:
    """Look up every row's graph at its rows; pipelines are no part of a fit."""
    rows = [row for row in rows if row.parallelism != "PP"]
    found = []
    for path in sorted(FOLDER.glob("*.json.xz")):
        for key, graph in read_graphs(path, wanted(rows)):
            own = [row for row in rows if row.key == key]
            nbytes = sum(p.spec.nbytes for p in graph.params if p.spec.requires_grad)
            sizes = {size: counted(graph.at(size)) for size in {row.micro_batch for row in own}}
            for row in own:
                device = cluster_of(row).devices[0]
                found.append(Priced(row, sizes[row.micro_batch], device, nbytes))
    return list({each.row.id: each for each in found}.values())


def with_shares(device: Device, shares: Shares) -> Device:
    """Return a preset's device at other shares."""
    card = PRESETS[device.preset]
    own = card.sustained

    def share(kind: str, usual: float) -> float:
        return shares.get((device.preset, kind), usual)

    tf32 = card.tf32_flops_per_s
    half = card.half_flops_per_s
    fp32 = card.flops_per_s * share("fp32", own.fp32)
    return replace(
        device,
        flops_per_s=fp32,
        half_flops_per_s=half * share("half", own.half) if half > card.flops_per_s else fp32,
        tf32_flops_per_s=tf32 and tf32 * share("tf32", own.tf32),
        memory_bytes_per_s=card.memory_bytes_per_s * share("memory", own.memory),
    )


def loss(rows: Iterable[Priced], shares: Shares, fitted: Fitted) -> float:
    """Return the mean of what errors are as logarithms, cut at a half: a broken row is no guide."""
    return fmean(
        min(0.5, abs(log(one.step_s(with_shares(one.device, shares), fitted) / one.row.step_s)))
        for one in rows
    )


def fit_shares(rows: Sequence[Priced], fitted: Fitted, start: Shares) -> Shares:
    """Fit each card's shares by turns, on its own rows."""
    found = dict(start)
    for card in sorted({one.device.preset for one in rows}):
        own = [one for one in rows if one.device.preset == card]
        kinds = {_kind(one.row) for one in own}
        for kind in sorted(kinds):
            key = (card, kind)
            usual = getattr(PRESETS[card].sustained, kind)
            found[key] = _best(
                found.get(key, usual), lambda v, k=key, o=own: loss(o, {**found, k: v}, fitted)
            )
    return found


def _kind(row: Row) -> str:
    if row.key.precision != "float32":
        return "half"
    return "tf32" if row.products_tf32 else "fp32"


def fit_rules(rows: Sequence[Priced], fitted: Fitted, shares: Shares) -> Fitted:
    """Fit what is assumed of families, one figure after another."""
    for one in fields(Fitted):
        now = getattr(fitted, one.name)
        best = _best(now, lambda v, n=one.name, f=fitted: loss(rows, shares, replace(f, **{n: v})))
        fitted = replace(fitted, **{one.name: best})
    return fitted


def _best(now: float, cost: object) -> float:
    """Return the best of some factors of a figure, then of finer ones."""
    assert callable(cost)
    for factors in ((0.6, 0.8, 1.0, 1.25, 1.6), (0.9, 1.0, 1.1), (0.97, 1.0, 1.03)):
        now = min((now * factor for factor in factors), key=cost)
    return now


@click.command()
@click.option("--data", type=click.Path(path_type=Path))
@click.option("--rounds", default=2, show_default=True)
@click.option("--only", default="", help="Sources that begin so.")
def main(data: Path | None, rounds: int, only: str) -> None:
    """Fit, and print what was found."""
    folder = data_folder(data)
    if folder is None:
        raise click.ClickException("no published rows: give --data")
    rows = [one for one in priced(read_rows(folder)[0]) if one.row.source.startswith(only)]
    shares: Shares = {}
    fitted = FITTED
    click.echo(f"{len(rows)} rows: {loss(rows, shares, fitted):.4f}")
    for _ in range(rounds):
        shares = fit_shares(rows, fitted, shares)
        click.echo(f"shares: {loss(rows, shares, fitted):.4f}")
        fitted = fit_rules(rows, fitted, shares)
        click.echo(f"rules: {loss(rows, shares, fitted):.4f} {fitted}")
    for key, share in shares.items():
        click.echo(f"{key}: {share:.3f}")


if __name__ == "__main__":
    main()
