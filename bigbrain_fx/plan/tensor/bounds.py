"""Graph, axes, a grouping -> about the least that a step can take, and the axes that pay.

Nothing is cut or simulated: this says what is worth planning, and in which order. Work that is
divided goes at the speed of all members together, the rest at that of the slowest; exchanges take
what their links take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bigbrain_fx.core import Axis, Cluster, Costs, Exchange
from bigbrain_fx.plan.tensor.exchange import sent_share
from bigbrain_fx.plan.tensor.groupings import Grouping
from bigbrain_fx.planning import bytes_per_s


@dataclass(frozen=True)
class Prices:
    """What ops take on each device, in a step of as few micro-batches as can be.

    Attributes:
        costs: of all ops, where no device slows another.
        cluster: with the links.
        micro_batches: of such a step: one, unless the trace is of fixed size.
    """

    costs: Costs
    cluster: Cluster
    micro_batches: int

    def speeds(self) -> dict[str, float]:
        """Return how often a second each device could do all of the model's work."""
        return {name: 1 / max(whole_s, 1e-12) for name, whole_s in self._all_s.items()}

    def paying(self, axes: Iterable[Axis], grouping: Grouping) -> tuple[Axis, ...]:
        """Return the axes whose exchanges take less than dividing their work saves."""
        return tuple(axis for axis in axes if self._pays(axis, grouping))

    def least_s(self, axes: Sequence[Axis], grouping: Grouping) -> float:
        """Return about the least that a step takes: all groups busy to its end."""
        divided = {name for axis in axes for name in (*axis.along, *axis.summed)}
        sent = {(e.kind, e.value): e for axis in axes for e in axis.exchanges}
        known: dict[object, float] = {}  # hundreds of groups are of a few kinds
        speed = 0.0
        for group in grouping.groups:
            key = self._kind(group)
            if key not in known:
                known[key] = self._group_s(group, divided, sent.values())
            speed += 1 / max(known[key], 1e-12)
        return 1 / speed

    def _kind(self, group: Sequence[str]) -> tuple[object, ...]:
        """Return all that a group's seconds depend on."""
        rates = (bytes_per_s(self.cluster, group[0], other) for other in group[1:])
        return (*(id(self._seconds[name]) for name in group), *rates)

    def _pays(self, axis: Axis, grouping: Grouping) -> bool:
        group = grouping.groups[0]
        ops = {*axis.along, *axis.summed}
        parts = self._group_s(group, ops, axis.exchanges, only=ops)
        whole = max(self._work_s(name, ops) for name in group)
        return parts < whole

    def _group_s(
        self,
        group: Sequence[str],
        divided: set[str],
        sent: Iterable[Exchange],
        only: set[str] | None = None,
    ) -> float:
        """Return the seconds of all ops, or of some, on one group alone."""
        parts = [self._work_s(name, divided) for name in group]
        together_s = 1 / sum(1 / max(seconds, 1e-12) for seconds in parts)
        if only is None:
            rest_s = max(self._all_s[name] - part for name, part in zip(group, parts, strict=True))
        else:
            rest_s = 0.0
        return together_s + rest_s + sum(self._exchange_s(group, each) for each in sent)

    def _exchange_s(self, group: Sequence[str], each: Exchange) -> float:
        nbytes = each.nbytes * sent_share(each.kind, each.nbytes // 4, len(group))
        rate = min(bytes_per_s(self.cluster, group[0], other) for other in group[1:])
        return (len(group) - 1) * nbytes / rate

    def _work_s(self, device: str, ops: Iterable[str]) -> float:
        each = self._seconds[device]
        return sum(each[name] for name in ops)

    @cached_property
    def _all_s(self) -> dict[str, float]:
        sums = {id(each): sum(each.values()) for each in self._seconds.values()}
        return {name: sums[id(each)] for name, each in self._seconds.items()}

    @cached_property
    def _seconds(self) -> dict[str, dict[str, float]]:
        """Device -> op -> seconds forward and back; devices of one kind share a table."""
        tables: dict[int, dict[str, float]] = {}
        found = {}
        for device, ops in self.costs.ops.items():
            if id(ops) not in tables:
                tables[id(ops)] = {
                    n: self.micro_batches * (cost.forward_s + cost.backward_s)
                    for n, cost in ops.items()
                }
            found[device] = tables[id(ops)]
        return found
