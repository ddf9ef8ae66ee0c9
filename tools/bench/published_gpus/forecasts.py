"""Row -> the seconds that the product forecasts, through the road of `estimate`, less the capture.

Memory is not asked here: cards have as much as it takes, and what a row's framework divides among
its GPUs (FSDP's optimizer) is divided after. It knows no errors and no tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache

from bigbrain_fx.cluster import PRESETS, parse_cluster
from bigbrain_fx.cluster.cards import USUAL
from bigbrain_fx.core import Cluster, Device, Graph
from bigbrain_fx.plan import Options, Plan, Source, costs_of, make_plan, with_placement
from tools.bench.published_gpus.balances import balanced
from tools.bench.published_gpus.rows import Row

_PLENTY = 2**50


@dataclass(frozen=True)
class Said:
    """A forecast beside its row."""

    row: Row
    step_s: float
    rule_s: float

    @property
    def error(self) -> float:
        """Forecast over measured, less one."""
        return self.step_s / self.row.step_s - 1

    @property
    def rule_error(self) -> float:
        """The same of the one-line rule."""
        return self.rule_s / self.row.step_s - 1


def forecast(row: Row, graph: Graph, *, usual: bool = False, slower: float = 1.0) -> Said:
    """Forecast one row.

    Args:
        row: the measurement.
        graph: of its model.
        usual: as if nobody had measured its card.
        slower: what the card's rates are divided by; what its process takes to start ops stays.
    """
    cluster = cluster_of(row)
    if usual:
        cluster = replace(cluster, devices=tuple(map(unmeasured, cluster.devices)))
    if slower != 1.0:
        devices = tuple(_slowed(device, slower) for device in cluster.devices)
        cluster = replace(cluster, devices=devices)
    plan = planned(row, graph, cluster)
    step_s = plan.forecast.step_s
    if row.last_is_kept:
        kept_s = planned(replace(row, recompute=False), graph, cluster).forecast.step_s
        step_s -= (step_s - kept_s) / row.accum
    if row.recompute and row.parallelism == "FSDP":
        step_s -= _not_again_s(plan)
    if graph.training:
        step_s -= _not_done(row) * _optimizer_s(plan)
    return Said(row, step_s, rule_s(row, graph, cluster))


def planned(row: Row, graph: Graph, cluster: Cluster) -> Plan:
    """Plan as the row was run; cut where its framework cut, if that was published."""
    plan = _planned(row, graph, cluster)
    placement = balanced(graph, row.key.name, row.gpus, row.accum)
    return plan if placement is None else with_placement(plan, placement)


def _planned(row: Row, graph: Graph, cluster: Cluster) -> Plan:
    whole = replace(graph, batch=row.samples)
    piped = row.parallelism == "PP"
    options = Options(
        "chain-dp" if piped and row.gpus > 1 else "naive",
        "compiled" if row.fused else "analytical",
        micro_batches=row.accum,
        schedule="gpipe" if piped and row.gpus > 1 else None,
        recompute="all" if row.recompute and graph.training else None,
    )
    return make_plan(whole, cluster, Source(""), options)


def cluster_of(row: Row) -> Cluster:
    """Return the devices that a plan of the row is for: a pipeline's all, else one."""
    return _cluster(row.card, row.gpus if row.parallelism == "PP" else 1, row.products_tf32)


@cache
def _cluster(card: str, count: int, products_tf32: bool) -> Cluster:
    entry = as_device(card, products_tf32)
    devices = [{**entry, "name": f"d{i}"} for i in range(count)]
    found = parse_cluster(json.dumps({"devices": devices}), card)
    return replace(found, devices=tuple(replace(d, memory_bytes=_PLENTY) for d in found.devices))


def unmeasured(device: Device) -> Device:
    """Return a preset's device at the shares of cards that nobody measured."""
    card = replace(PRESETS[device.preset], sustained=USUAL)
    return replace(
        device,
        flops_per_s=card.sustained_flops_per_s,
        half_flops_per_s=card.sustained_half_flops_per_s,
        tf32_flops_per_s=card.sustained_tf32_flops_per_s,
        memory_bytes_per_s=card.sustained_memory_bytes_per_s,
    )


def _slowed(device: Device, times: float) -> Device:
    """Return a device at a part of all its rates."""
    tf32, half = device.tf32_flops_per_s, device.half_flops_per_s
    return replace(
        device,
        flops_per_s=device.flops_per_s / times,
        half_flops_per_s=half and half / times,
        tf32_flops_per_s=tf32 and tf32 / times,
        memory_bytes_per_s=device.memory_bytes_per_s / times,
    )


def as_device(card: str, products_tf32: bool) -> dict[str, str]:
    """Return what a user would write of a card."""
    return {"preset": card, **({"matmul_precision": "high"} if products_tf32 else {})}


def _not_done(row: Row) -> float:
    """Return the share of the optimizer's step that this GPU does not do."""
    if not row.with_optimizer:
        return 1.0
    return 1 - 1 / row.gpus if row.parallelism == "FSDP" else 0.0


_NOT_AGAIN = ("tokens.weight", ".down.weight")


def _not_again_s(plan: Plan) -> float:
    """Return what composer's checkpoints do not compute again, and ours, of whole stages, do.

    Embedding and head lie outside of its blocks, and torch ends a block's second forward as soon
    as all that it saved is there: before the last product.
    """
    own = [op for op in plan.graph.ops if any(p.endswith(_NOT_AGAIN) for p in op.params)]
    costs = costs_of(plan)
    once_s = sum(costs.ops[plan.placement.device_of[op.name]][op.name].forward_s for op in own)
    return once_s * plan.micro_batches


def _optimizer_s(plan: Plan) -> float:
    costs = costs_of(plan)
    own: dict[str, list[int]] = {}
    for stage in plan.stages.stages:
        for name in stage.params:
            spec = plan.graph.param[name].spec
            if spec.requires_grad:
                own.setdefault(stage.device, []).append(spec.nbytes)
    return max((costs.optimizer_s(d, len(s), sum(s)) for d, s in own.items()), default=0.0)


# --------------------------------------------------------------------------- the one-line rule


def rule_s(row: Row, graph: Graph, cluster: Cluster) -> float:
    """Return what "six flops a parameter and token at 55 % of peak" says.

    Two where nothing is trained, eight with recompute. An image model has no tokens: three times
    (once, four times) the flops of its forward.
    """
    card = PRESETS[cluster.devices[0].preset]
    peak = card.flops_per_s if row.key.precision == "float32" else card.half_flops_per_s
    if row.products_tf32 and card.tf32_flops_per_s:
        peak = card.tf32_flops_per_s
    times = (4 if row.recompute else 3) if graph.training else 1
    if row.key.name.startswith(("mpt", "bert", "gpt")):
        numbers = sum(p.spec.numel for p in graph.params if p.kind == "parameter")
        forward = 2 * numbers * row.samples * row.key.side
    else:
        forward = sum(int(op.flops) for op in graph.at(row.samples).ops)
    gpus = row.gpus if row.parallelism == "PP" else 1
    return times * forward / (0.55 * peak) / gpus
