"""What it costs a member to compute an op along an axis, and to have a value in another form.

In bytes that it sends, or in seconds by the planner's own clock: what ops and exchanges take, a
latency for each round of messages among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

from bigbrain_fx.core import Axis, Graph, Op, TensorSpec
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import sharded
from bigbrain_fx.plan.tensor.exchange import SPACE, exchange_s, pieces, sum_s
from tools.placement_case import Case

Form: TypeAlias = str  # "whole", "sum" (parts of one), "copy" (whole, for a part), or an axis
WHOLE, SUM, COPY = "whole", "sum", "copy"


class Prices(Protocol):
    """What placements are compared by."""

    def computes(self, op: str, axis: Axis | None) -> float:
        """Return what an op costs a member, whole or along an axis."""

    def converts(self, spec: TensorSpec, source: Form, target: Form, *, is_param: bool) -> float:
        """Return what it costs to read a value in another form than it is in; both passes."""


@dataclass(frozen=True)
class Exchanges:
    """What it costs a member, in bytes sent, to have a value in another form."""

    members: int
    all_to_all: bool

    def computes(self, op: str, axis: Axis | None) -> float:
        """Return nothing: ops send no bytes."""
        return 0.0

    def converts(self, spec: TensorSpec, source: Form, target: Form, *, is_param: bool) -> float:
        """Return the bytes that a member sends."""
        return self.sent(spec.nbytes, spec.requires_grad, source, target)

    def sent(self, nbytes: int, graded: bool, source: Form, target: Form) -> float:
        """Return the bytes forward and backward; a copy's are beside those of the whole value."""
        all_of, part = self._all(nbytes), (self.members - 1) * nbytes / self.members
        back = part if graded else 0.0
        if source == target:
            return 0.0
        if target == COPY:
            if not graded:
                return 0.0
            return part if source not in (WHOLE, SUM) else all_of
        if target == WHOLE:
            return all_of if source == SUM else part
        if source == WHOLE:
            return back
        if source == SUM:
            return part + back
        return (part + back) / (self.members if self.all_to_all else 1)

    def _all(self, nbytes: int) -> float:
        """Return what each sends to have a sum: all of it to all, or twice a piece of it."""
        others = self.members - 1
        whole = len(pieces(nbytes // 4, self.members)) == 1
        return others * (float(nbytes) if whole else 2 * nbytes / self.members)


@dataclass(frozen=True)
class Clock:
    """The same in seconds, as the planner counts them.

    Copies of parameters are added in one message at the end of a backward: they have no latency
    here.
    """

    case: Case
    all_to_all: bool

    def computes(self, op: str, axis: Axis | None) -> float:
        """Return the seconds of both passes; along an axis at most those of the whole op."""
        whole = self._whole[op]
        return whole if axis is None else min(whole, self._along[axis.name].get(op, whole))

    def converts(self, spec: TensorSpec, source: Form, target: Form, *, is_param: bool) -> float:
        """Return the seconds of the exchanges; a copy's are beside those of the whole value."""
        if source == target or (target == COPY and not spec.requires_grad):
            return 0.0
        if target == COPY:
            return self._copied_s(spec, source, is_param=is_param)
        if target == WHOLE:
            return self._round_s("all_reduce" if source == SUM else "all_gather", spec.numel)
        part = spec.numel // self.case.members
        back = self._round_s("split", part, backward=True) if spec.requires_grad else 0.0
        if source == WHOLE:
            return back
        if source == SUM:
            return self._round_s("reduce_scatter", part) + back
        both = 2 if spec.requires_grad else 1
        if self.all_to_all:
            return both * self._round_s("all_gather", part)
        return self._round_s("all_gather", spec.numel) + back

    def _copied_s(self, spec: TensorSpec, source: Form, *, is_param: bool) -> float:
        is_whole = source in (WHOLE, SUM)
        if is_param:
            nbytes = spec.nbytes if is_whole else spec.nbytes // self.case.members
            about = self.case.plan.cluster, self.case.group
            return max(0.0, sum_s(nbytes, *about) - sum_s(0, *about))
        kind = "copy_to_group" if is_whole else "gather_to_group"
        return self._round_s(kind, spec.numel, backward=True)

    def _round_s(self, kind: str, numel: int, *, backward: bool = False) -> float:
        spec = TensorSpec((numel,), "float32", (1,), requires_grad=True)
        op = Op("exchange", SPACE + kind, (), outputs=(spec,))
        return exchange_s(op, self.case.plan.cluster, self.case.group, backward=backward)

    @cached_property
    def _whole(self) -> Mapping[str, float]:
        return self._ops_s(self.case.graph)

    @cached_property
    def _along(self) -> Mapping[str, Mapping[str, float]]:
        shares = (1,) * self.case.members
        return {
            axis.name: self._ops_s(sharded(self.case.graph, (axis,), shares).members[0])
            for axis in self.case.axes
        }

    def _ops_s(self, graph: Graph) -> Mapping[str, float]:
        """Estimate each op with what a member runs around it, exchanges left out.

        What stands after a sum, a bias, may be divided along the sequence: a part of it is counted.
        """
        plan = self.case.plan
        costs = estimated(graph, plan.cluster, plan.source, plan.estimator)
        found: dict[str, float] = {}
        around_s = 0.0
        for op in graph.ops:
            cost = costs.op_cost(op.name, "d0")
            own_s = 0.0 if op.target.startswith(SPACE) else cost.forward_s + cost.backward_s
            if op.name in self.case.graph.op:
                has_parts = f"{op.name}_part" in graph.op
                found[op.name] = around_s + own_s / (self.case.members if has_parts else 1)
                around_s = 0.0
            else:
                around_s += own_s
        return found
