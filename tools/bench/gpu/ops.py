"""Op by op: what was measured, what `analytical` says, what a roofline takes; by family."""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Device, Graph, Op, OpCost
from bigbrain_fx.costs.model import family
from bigbrain_fx.costs.profiles import Machine, signature
from bigbrain_fx.plan import Plan
from bigbrain_fx.planning.registry import estimator
from tools.bench.gpu.card import as_profiled
from tools.bench.gpu.report import families
from tools.bench.gpu.rows import Family

_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_BACKWARD = 2.5  # five matrix products backward to two forward
_HALF = ("float16", "bfloat16")


def op_table(plan: Plan, machine: Machine) -> list[Family]:
    """Return the families of a step of a plan on one device, the dearest first.

    Measured times are as the profile database has them: the machine's own, scaled to nothing.

    Args:
        plan: on the device at doctor's rates.
        machine: that profiled.
    """
    graph, (device,) = plan.graph.at(plan.rows), plan.cluster.devices
    found = estimator("measured").estimate(graph, as_profiled(plan.cluster, machine))
    said = estimator("analytical").estimate(graph, plan.cluster)
    known = [graph.op[name] for name in found.measured.get(device.name, ()) if name in graph.op]
    each = [
        _family(
            graph,
            op,
            device,
            found.op_cost(op.name, device.name),
            said.op_cost(op.name, device.name),
        )
        for op in known
    ]
    return [_times(one, plan.micro_batches) for one in families(each)]


def _family(graph: Graph, op: Op, device: Device, found: OpCost, said: OpCost) -> Family:
    return Family(
        name=family(op.target),
        ops=1,
        forward_s=found.forward_s,
        backward_s=found.backward_s,
        analytical_forward_s=said.forward_s,
        analytical_backward_s=said.backward_s,
        roofline_forward_s=roofline_s(op, device, 1.0),
        roofline_backward_s=(
            roofline_s(op, device, _products(graph, op)) if found.backward_s else 0.0
        ),
    )


def _times(one: Family, micro_batches: int) -> Family:
    """Return a family of all micro-batches: as many ops, so many times their seconds."""
    return replace(
        one,
        forward_s=micro_batches * one.forward_s,
        backward_s=micro_batches * one.backward_s,
        analytical_forward_s=micro_batches * one.analytical_forward_s,
        analytical_backward_s=micro_batches * one.analytical_backward_s,
        roofline_forward_s=micro_batches * one.roofline_forward_s,
        roofline_backward_s=micro_batches * one.roofline_backward_s,
    )


def roofline_s(op: Op, device: Device, times: float) -> float:
    """Return what an op takes at a device's full rates, its flops so many times.

    Bytes count once: those of the forward call. A view moves none.
    """
    if op.body is not None:
        return sum(roofline_s(inner, device, times) for inner in op.body.ops)
    if op.view_of is not None:
        return 0.0
    half = bool(op.outputs) and op.outputs[0].dtype in _HALF
    flops_per_s = (device.half_flops_per_s if half else None) or device.flops_per_s
    moved = int(op.reads_bytes) + int(op.writes_bytes)
    return max(times * int(op.flops) / flops_per_s, moved / device.memory_bytes_per_s)


def _products(graph: Graph, op: Op) -> float:
    """Return how often the backward has the forward's flops: once for each gradient it makes."""
    if family(op.target) == _ATTENTION:
        return _ATTENTION_BACKWARD
    if op.body is not None:
        return 1.0
    return float(sum(tensor.wants_grad for tensor in signature(graph, op).tensors))
