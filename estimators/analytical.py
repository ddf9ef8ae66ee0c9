"""`analytical`: a roofline for every op, max(flops / rate, bytes / bandwidth) + launch.

Forward and backward apart, and in the backward the gradients of the op's inputs apart from those of
its parameters. It runs nothing and needs no weights.

T = max(flops / (F e_f), bytes / (BW e_b)) + launches. Source: the roofline of Williams, Waterman
and Patterson, CACM 2009. The shares e_f and e_b are in `op_rules`. A CPU's convolution copies its
tensors into blocks before the product and back after it, so there the times add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Op, OpCost
from bigbrain_fx.planning import GraphMemo, nameless

from .calls import GraphScope, PricedCall, number
from .cuda_clock import HALF, CudaClock
from .cuda_residuals import residual
from .op_rules import (
    ANY_OTHER,
    CUDA_OPTIMIZER_LAUNCHES,
    DICE,
    GELU_TANH,
    OP_RULES,
    OPTIMIZER_LAUNCHES,
    OPTIMIZER_TOUCHES,
    VIEW,
    Blocked,
    OpRule,
)
from .saved_activations import saved_bytes, scores_bytes

ATTENTION_BACKWARD = 2.5  # five matrix products backward to two forward
SUM_TOUCHES = 3.0  # adding up moves each byte three times: two reads and a write
SUM_LAUNCHES = 3.0  # to add the gradient of one parameter to what is there
VIEW_LAUNCHES = 4.5  # a module's call among them
PART_LAUNCHES = 1.0  # one of several results: no op
VIEW_BACKWARD_LAUNCHES = 1.3
OPTIMIZER_STATE = 2.0  # Adam keeps two moments


@dataclass(frozen=True)
class Analytical:
    """Estimate every op from its floating point operations and bytes, and the device's rates."""

    name = "analytical"

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device.

        Devices with equal rates share their figures. Regions cost the sum of their ops. What
        several ops keep for the backward counts at the first of them. Sizes cost nothing.
        """
        return estimated(graph, cluster, fused=False)


def estimated(graph: Graph, cluster: Cluster, *, fused: bool) -> Costs:
    """Estimate as `Analytical` does; `fused`: GPUs run what torch.compile makes of the graph."""
    return Costs(
        ops={device.name: _all_costs(graph, _rates(device), fused) for device in cluster.devices},
        cluster=cluster,
        optimizer_s_per_byte={
            device.name: OPTIMIZER_TOUCHES / device.memory_bytes_per_s for device in cluster.devices
        },
        optimizer_state_per_byte=OPTIMIZER_STATE,
        optimizer_s_per_tensor={
            device.name: _optimizer_launches(device) * device.launch_s for device in cluster.devices
        },
    )


def family(target: str) -> str:
    """Return an op's plain name: "aten.relu_.default" -> "relu"."""
    parts = target.split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else target


def rule_of(op: Op) -> OpRule:
    """Return what is assumed of an op."""
    if op.view_of is not None:
        return VIEW
    rule = OP_RULES.get(family(op.target), ANY_OTHER)
    if family(op.target) == "gelu" and "tanh" in (*op.args[1:], *dict(op.kwargs).values()):
        return replace(rule, speed=GELU_TANH)
    return rule


def _optimizer_launches(device: Device) -> float:
    return OPTIMIZER_LAUNCHES if device.kind == "cpu" else CUDA_OPTIMIZER_LAUNCHES


def _rates(device: Device) -> Device:
    return replace(nameless(device), memory_bytes=0)


_known = GraphMemo[Mapping[str, OpCost]]()


def _all_costs(graph: Graph, device: Device, fused: bool) -> Mapping[str, OpCost]:
    return _known.get(
        graph, (device, fused), lambda: dict(_costs(GraphScope(graph), device, set(), fused))
    )


def _costs(
    scope: GraphScope, device: Device, kept: set[str], fused: bool
) -> Iterator[tuple[str, OpCost]]:
    for call in scope.calls():
        yield call.op.name, _cost(call, device, kept, fused)


def _cost(call: PricedCall, device: Device, kept: set[str], fused: bool) -> OpCost:
    op = call.op
    if op.body is not None:
        return _region(call, op.body, device, kept, fused)
    if not op.outputs and not op.mutates:
        return OpCost(0.0)  # a size
    rule = rule_of(op)
    clock: _Clock | CudaClock
    host_forward_s = host_backward_s = 0.0
    factor = 1.0
    if device.kind == "cuda":
        clock = CudaClock(call, rule, family(op.target), device, fused=fused)
        host_forward_s, host_backward_s = clock.host_forward_s(), clock.host_backward_s()
        factor = residual(device, clock.likeness)
    else:
        clock = _Clock(call, rule, device)
    if not op.requires_grad:
        return OpCost(factor * clock.forward_s(), host_forward_s=host_forward_s)
    input_s = factor * (clock.inputs_backward_s() + clock.fan_out_s())
    return OpCost(
        host_forward_s=host_forward_s,
        host_backward_s=host_backward_s,
        forward_s=factor * clock.forward_s(),
        backward_s=input_s + factor * clock.weights_backward_s(),
        backward_input_s=input_s,
        saved_bytes=saved_bytes(call, rule, device.kind, kept),
        workspace_bytes=_workspace_bytes(call, rule, device),
    )


def _region(call: PricedCall, body: Graph, device: Device, kept: set[str], fused: bool) -> OpCost:
    costs = [cost for _, cost in _costs(GraphScope(body, call.scope), device, kept, fused)]
    gradient = call.op.requires_grad  # within no_grad the forward is all there is
    return OpCost(
        forward_s=sum(cost.forward_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs) if gradient else 0.0,
        backward_input_s=sum(cost.backward_input_s for cost in costs) if gradient else 0.0,
        host_forward_s=sum(cost.host_forward_s for cost in costs),
        host_backward_s=sum(cost.host_backward_s for cost in costs) if gradient else 0.0,
        saved_bytes=sum(cost.saved_bytes for cost in costs) if gradient else 0,
        workspace_bytes=max((cost.workspace_bytes for cost in costs), default=0),
    )


def _workspace_bytes(call: PricedCall, rule: OpRule, device: Device) -> int:
    """Return what is there while it runs, beside its result: the gradients of its inputs."""
    if call.op.saves is not None and device.kind == "cpu":
        saves = call.op.saves
        forward = number(saves.forward_bytes) - number(saves.own_bytes)
        return max(0, forward - number(call.op.writes_bytes), number(saves.backward_bytes))
    inputs = sum(spec.nbytes for _, spec in call.values if spec.requires_grad)
    return inputs + (scores_bytes(call, device.kind) if rule.kind == "attention" else 0)


@dataclass(frozen=True)
class _Clock:
    """The seconds of one call on one CPU, which starts each op when the one before is done."""

    call: PricedCall
    rule: OpRule
    device: Device

    @property
    def flops_per_s(self) -> float:
        """The device's rate for what the call computes with."""
        is_half = self.call.op.outputs != () and self.call.result.dtype in HALF
        return (self.device.half_flops_per_s if is_half else None) or self.device.flops_per_s

    def forward_s(self) -> float:
        speed = self.rule.speed
        if self.call.op.view_of is not None:
            is_part = family(self.call.op.target) == "getitem"
            return self._launches_s(PART_LAUNCHES if is_part else VIEW_LAUNCHES)
        if self.rule.blocked is not None:
            return self._blocked_s(self.rule.blocked.forward)
        compute_s = self.call.flops / (self.flops_per_s * speed.flops)
        memory_s = self.call.moved_bytes / (self.device.memory_bytes_per_s * speed.bytes)
        return max(compute_s, memory_s) + self._noise_s() + self._launches_s(speed.launches)

    def inputs_backward_s(self) -> float:
        """Return the seconds to make the gradients of its inputs."""
        if not self.call.wanted:
            return 0.0
        match self.rule.kind:
            case "product":
                factors = 1 if self.call.trained else self.call.wanted
                blocked = self.rule.blocked
                each_s = self._blocked_s(blocked.inputs) if blocked else self._products_s(1.0)
                return factors * each_s
            case "attention":
                return self._products_s(ATTENTION_BACKWARD)
            case "view":
                return self._view_backward_s()
        if self.rule.speed.backward_bytes is None:
            return self._launches_s(self.rule.speed.backward_launches)
        return self._pass_s(self.call.moved_bytes)

    def weights_backward_s(self) -> float:
        """Return the seconds to make the gradients of its parameters, and to add them up."""
        if not self.call.trained:
            return 0.0
        nbytes = sum(spec.nbytes for spec in self.call.trained)
        own_s = 0.0
        if self.rule.blocked is not None:
            own_s = self._blocked_s(self.rule.blocked.weights)
        elif self.rule.kind == "product":
            own_s = self._products_s(1.0)
        elif self.rule.kind == "lookup":
            own_s = self._pass_s(nbytes)
        elif not self.call.wanted:
            own_s = self._pass_s(self.call.moved_bytes)
        summed_s = (1.0 + SUM_TOUCHES) * nbytes / self.device.memory_bytes_per_s
        return own_s + summed_s + self._launches_s(SUM_LAUNCHES * len(self.call.trained))

    def fan_out_s(self) -> float:
        """Return the seconds to add up the gradients that come from several readers."""
        extra = self.call.scope.gradients_into(self.call.op.name) - 1
        if self.call.op.is_tuple or extra < 1:
            return 0.0
        sum_s = SUM_TOUCHES * self.call.result.nbytes / self.device.memory_bytes_per_s
        return extra * (sum_s + self._launches_s(1.0))

    def _noise_s(self) -> float:
        """Return the seconds to draw the noise of attention's scores, where it is drawn."""
        if self.rule.kind != "attention":
            return 0.0
        drawn = scores_bytes(self.call, self.device.kind)
        return drawn / (self.device.memory_bytes_per_s * DICE.bytes)

    def _blocked_s(self, blocked: Blocked) -> float:
        """Time a product and the reorders of its tensors, one after another."""
        weights = sum(spec.nbytes for spec in self.call.weights)
        tensors = self.call.moved_bytes - weights
        touched = blocked.tensor_touches * tensors + blocked.weight_touches * weights
        compute_s = self.call.flops / (self.flops_per_s * blocked.flops)
        reorders_s = touched / self.device.memory_bytes_per_s
        return compute_s + reorders_s + self._launches_s(blocked.launches)

    def _products_s(self, products: float) -> float:
        rate = self.flops_per_s * self.rule.speed.backward_flops
        return max(products * self.call.flops / rate, self._pass_s(self.call.moved_bytes))

    def _pass_s(self, nbytes: int) -> float:
        share = self.rule.speed.backward_bytes or 1.0
        pass_s = nbytes / (self.device.memory_bytes_per_s * share)
        return pass_s + self._launches_s(self.rule.speed.backward_launches)

    def _view_backward_s(self) -> float:
        """Time zeros and a copy for a part, a sum for an expansion, nothing for other views."""
        base, own = self.call.values[0][1].nbytes, self.call.result.nbytes
        if base == own:
            return self._launches_s(VIEW_BACKWARD_LAUNCHES)
        return self._pass_s(base + own)

    def _launches_s(self, launches: float) -> float:
        return self.device.launch_s * launches
