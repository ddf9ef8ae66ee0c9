"""`chain-dp`: the best contiguous split by dynamic programming, on heterogeneous clusters.

Source: the objective is Alpa's (Zheng et al., OSDI'22, section 5.2): for each bound on the slowest
stage minimise the sum. Here it includes transfers, links are resources of their own, and concrete
devices in every order replace submeshes. `planning.best_first` replaces the scan of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from bigbrain_fx.core import Cluster, Costs, Graph, Placement, micro_text
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning import (
    BestFirst,
    Cutter,
    Found,
    InFlight,
    Line,
    Setting,
    Split,
    Work,
    chain_of,
    device_orders,
    in_flight_at,
    nearest,
    polished,
    step_s,
    unit_orders,
    whole_layers,
    work,
)

MOST_UNITS = 1000  # longer chains are cut only where little crosses
MOST_STEPS = 10_000  # stages solved, for each order of the units
MOST_STEPS_TO_FIT = 100_000  # the same, as long as nothing that fits was met
MOST_SEQUENCES = 2000  # six unlike devices have 1956


@dataclass(frozen=True)
class ChainDP:
    """Split the ops, in a topological order, into one contiguous piece per device.

    Minimises, over three topological orders of the ops, every order of the devices (see
    `planning.device_orders`) and every cut,

        sum of all stage and transfer times + (micro_batches - 1) x the busiest stage or link

    where a stage's time is forward + backward of one micro-batch, and what happens once a step
    (optimizer, gradients of tied parameters) counts 1/micro_batches. A value counts at every cut
    between its maker and its last reader, though it is sent straight to the devices that read it.
    Candidates are the best splits met on the way, and some whose stages end together or have as
    many ops each. Those that are fastest in 1F1B are polished (`planning.polish`), and the fastest
    is taken. Memory is a hard limit: see `planning.piece_memory`.

    Attributes:
        micro_batches: per step.
        in_flight: micro-batches that a stage holds at once: a number (GPipe: `micro_batches`), one
            per stage, or None for classic 1F1B.
        use_all: use every device, even where fewer are faster.
        gap: stop when the split is proven to be within this share of the best one.
        block_gap: cut between layers of the model rather than inside one, unless that costs more
            than this part of the step. Such stages are easier to read, and send less. Infinity
            never cuts inside one.
    """

    micro_batches: int = 8
    in_flight: InFlight = None
    use_all: bool = False
    gap: float = 1e-3
    block_gap: float = 0.04
    name = "chain-dp"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known = work(graph, costs)
        if not known.groups:
            return Placement(known.placed((), cluster.devices[0].name), "nothing to split")
        if self.block_gap == math.inf:
            known = whole_layers(graph, known)
        found = self.fastest(known, cluster)
        if found is None:
            raise NoPlanError.later(lambda: self.no_plan(known, cluster))
        if 0 < self.block_gap < math.inf:
            found = self._between_layers(graph, known, cluster, found)
        homes = found.line.homes(found.split)
        placed = found.line.work.placed(homes, found.split.sequence[0])
        return Placement(placed, self._reason(graph, found, cluster))

    def _between_layers(self, graph: Graph, known: Work, cluster: Cluster, found: Found) -> Found:
        """Return the best split that cuts no layer, if it is about as good as `found`."""
        other = self.fastest(whole_layers(graph, known), cluster)
        most_s = found.step_s * (1 + self.block_gap)
        return found if other is None or other.step_s > most_s else other

    def cutters(self, known: Work, cluster: Cluster) -> Iterator[Cutter]:
        """Yield the units in every order that is tried, ready to be cut."""
        setting = Setting(cluster, self.micro_batches, in_flight=self.in_flight)
        for order in unit_orders(known.count, known.edges):
            yield Cutter(Line(known, order, MOST_UNITS), setting)

    def sequences(self, cutter: Cutter) -> tuple[tuple[str, ...], ...]:
        """Return the orders of devices that are worth trying, the best looking first."""
        count, every = len(cutter.setting.cluster.devices), _sequences(cutter, self.micro_batches)
        return tuple(s for s in every if not self.use_all or len(s) == count)

    def fastest(self, known: Work, cluster: Cluster) -> Found | None:
        """Return the fastest of the good splits; None when nothing fits."""
        met: list[tuple[Cutter, Split]] = []
        best = self.best(known, cluster, met)
        if best is None:
            return None
        cutter, split = best
        met.sort(key=lambda entry: entry[1].step_s(self.micro_batches))
        every = [best, *met[:_PACED], *((cutter, other) for other in self._shaped(cutter, split))]
        once = {(id(on), other.sequence, other.cuts): (on, other) for on, other in every}
        paced = sorted(((on, self._paced(on, other)) for on, other in once.values()), key=_by_pace)
        better = [(on, polished(on, found, _VISITS)) for on, found in paced[:_POLISHED]]
        fitting = (
            found
            for on, found in sorted((*better, *paced), key=_by_pace)
            if self.holds_in_any_order(on, found.split)
        )
        return next(fitting, None)

    def _shaped(self, cutter: Cutter, split: Split) -> Iterator[Split]:
        """Yield splits of another shape than the objective's, for sequences that look good."""
        for sequence in dict.fromkeys((split.sequence, *self.sequences(cutter)[:_SHAPED])):
            solved = cutter.solve(sequence, float("inf"))
            for other in (solved, cutter.tapered(sequence), cutter.even(sequence)):
                if other is not None:
                    yield other

    def best(
        self, known: Work, cluster: Cluster, met: list[tuple[Cutter, Split]]
    ) -> tuple[Cutter, Split] | None:
        """Return the split of least objective; those met on the way are added to a list."""
        best: tuple[Cutter, Split] | None = None
        sequences: Sequence[tuple[str, ...]] = ()
        for cutter in self.cutters(known, cluster):
            sequences = sequences or self.sequences(cutter)
            search = BestFirst(cutter, best[1] if best else None)
            search.run(sequences, self.gap, MOST_STEPS)
            if search.best is None:
                search.run((), self.gap, MOST_STEPS_TO_FIT)
            met += [(cutter, other) for other in search.met.values()]
            if search.best is not None and (best is None or search.best is not best[1]):
                best = cutter, search.best
        if best is None or self.holds_in_any_order(*best):
            return best
        met.clear()
        most = max(self.in_flight) if isinstance(self.in_flight, tuple) else len(cluster.devices)
        return replace(self, in_flight=most).best(known, cluster, met)  # no stage ever holds more

    def _paced(self, cutter: Cutter, split: Split) -> Found:
        """Play a split through."""
        line, setting, count = cutter.line, cutter.setting, len(split.sequence)
        again = tuple(range(count)) if line.work.recompute else ()
        flights = tuple(setting.flight(stage, count) for stage in range(count))
        chain = chain_of(line, split, setting, again)
        micro = self.micro_batches
        paced_s = step_s(chain, micro, flights, line.work.trains)
        return Found(line, split, micro, flights, again, paced_s)

    def holds_in_any_order(self, cutter: Cutter, split: Split) -> bool:
        """Whether it fits even when stages that do not depend on each other change places."""
        line = cutter.line
        before = upstream(line.work, line.homes(split))
        flights = in_flight_by_device(before, self.micro_batches, self.in_flight)
        return all(
            line.memory.reach(device, flights[device], cutter.setting).has(first, after)
            for device, (first, after) in zip(split.sequence, pairwise(split.cuts), strict=True)
        )

    def no_plan(self, known: Work, cluster: Cluster) -> NoPlanError:
        """Return the error for a model that does not fit, with the nearest to what does."""
        cutter = next(self.cutters(known, cluster))
        ranked = sorted(self.sequences(cutter), key=len, reverse=True)
        every = [s for s in ranked if len(s) <= cutter.line.count][:_SEQUENCES_TO_EXPLAIN]
        found = [*nearest(cutter.line, cutter.setting, every, most=2.0**40)]
        if not found:
            count, devices = known.count, len(cluster.devices)
            return NoPlanError(
                f"{devices} devices cannot share {count} groups of ops that stay together",
                code="BX1405",
                help=f"use at most {count} devices, or let the planner leave some out",
            )
        scale, split = min(found, key=lambda each: each[0])
        homes = cutter.line.homes(split)
        return NoPlanError(
            "no split fits into the devices' memory; this is the nearest",
            code="BX1406",
            help=f"give every device {scale:.1f} times the memory, or use more micro-batches, or "
            "more devices",
            nearest=known.placed(homes, homes[0]),
        )

    def _reason(self, graph: Graph, found: Found, cluster: Cluster) -> str:
        split = found.split
        used, offered = len(split.sequence), len(cluster.devices)
        head = (
            f"{used} of {offered} devices, {' -> '.join(split.sequence)}: about "
            f"{found.step_s:.4g} s a step at {micro_text(self.micro_batches)}, "
            f"{split.most_s:.4g} s each on the busiest device or link; the best of the device "
            "orders tried"
        )
        cuts = [describe(graph, found.line, split, stage) for stage in range(1, used)]
        return "\n".join((head, *cuts))


@lru_cache(maxsize=1)
def _sequences(cutter: Cutter, micro_batches: int) -> tuple[tuple[str, ...], ...]:
    """Return orders of devices for a line: once, though they are asked for again and again."""
    rough = cutter.line.rough(micro_batches)
    return device_orders(cutter.setting.cluster, MOST_SEQUENCES, rough)


def _by_pace(entry: tuple[Cutter, Found]) -> float:
    return float(f"{entry[1].step_s:.9e}")  # of equal ones, but for rounding, the first


_PACED = 24  # splits that are played through
_POLISHED = 2  # and polished
_VISITS = 15_000  # forwards, backwards and units that may be looked at to polish one
_SHAPED = 10  # sequences of devices for which splits of other shapes are, too
_SEQUENCES_TO_EXPLAIN = 24


def describe(graph: Graph, line: Line, split: Split, stage: int) -> str:
    """Return a line on one cut: where it is, and what crosses it."""
    cut = split.cuts[stage]
    place = int(line.places[cut])
    op = graph.op[line.work.groups[line.order[place - 1]][-1]]
    crossing = line.crossing
    forward, backward = (
        int(each[cut]) for each in (crossing.forward_bytes, crossing.backward_bytes)
    )
    where = f"{op.name} ({op.source})" if op.source else op.name
    ends = f"{split.sequence[stage - 1]} | {split.sequence[stage]}"
    return f"{ends}: after {where}; {forward:,} bytes forward, {backward:,} back per micro-batch"


def upstream(known: Work, homes: Sequence[str]) -> dict[str, set[str]]:
    """Return for each device in use, in order of its first unit, those that it waits for."""
    before: dict[str, set[str]] = {device: set() for device in homes}
    edges = {(homes[a], homes[b]) for a, b in known.edges if homes[a] != homes[b]}
    reached = -1
    while (found := sum(map(len, before.values()))) > reached:
        reached = found
        for maker, reader in edges:
            before[reader] |= before[maker]
            before[reader].add(maker)
    return before


def in_flight_by_device(
    before: Mapping[str, set[str]], micro_batches: int, in_flight: InFlight
) -> dict[str, int]:
    """Return the most micro-batches that each device of a pipeline may hold.

    A stage can run as early as the stages that it depends on allow. Where two do not depend on
    each other (two towers, say), either may come first, and each is counted as if it did.
    """
    return {
        device: in_flight_at(len(devices), len(before), micro_batches, in_flight)
        for device, devices in before.items()
    }
