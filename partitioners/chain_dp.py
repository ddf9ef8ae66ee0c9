"""`chain-dp`: the best contiguous split by dynamic programming, for unlike devices and links.

Source: the objective is Alpa's (Zheng et al., OSDI'22, section 5.2: for each bound on the slowest
stage minimise the sum), with transfers in it, links as resources of their own, concrete devices in
every order instead of submeshes, and, instead of a scan of the bounds, a best-first search that
proves its gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.orders import unit_orders
from partitioners.coarse import blocks, quiet_cuts
from partitioners.facts import Facts, facts
from partitioners.footprint import in_flight_at, in_flight_by_device, needs
from partitioners.line import Line, Solver, Split
from partitioners.orders import device_sequences
from partitioners.remedy import no_plan

MOST_UNITS = 1500  # longer chains are shortened first, by merging neighbours
MOST_SOLVES = 20_000


@dataclass(frozen=True)
class ChainDP:
    """Split the ops, in a topological order, into one contiguous piece per device.

    Minimises, over three topological orders of the ops, every order of the devices (see
    `device_sequences`) and every cut,

        sum of all stage and transfer times + (micro_batches - 1) x the busiest stage or link

    where a stage's time is forward + backward of one micro-batch, and what happens once a step
    (optimizer, gradients of tied parameters) counts 1/micro_batches. A value counts at every cut
    between its maker and its last reader, though it is sent straight to the devices that read it.
    Memory is a hard limit: see `footprint`.

    Attributes:
        micro_batches: per step.
        in_flight: micro-batches that a stage holds at once: a number (GPipe: `micro_batches`), one
            per stage, or None for classic 1F1B.
        use_all: use every device, even where fewer are faster.
        gap: stop when the split is proven to be within this share of the best one.
        block_gap: cut between layers of the model rather than inside one, unless that costs more
            than this share of the step: such stages are easier to read, and send less.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    use_all: bool = False
    gap: float = 1e-3
    block_gap: float = 0.02
    name = "chain-dp"

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise InputError(f"a step needs at least 1 micro-batch, not {self.micro_batches}")

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph.

        Raises:
            NoPlanError: no split fits the devices' memory; with the arithmetic of the nearest one.
        """
        known = facts(graph, costs)
        if not known.groups:
            return Placement(known.placed((), cluster.devices[0].name), "nothing to split")
        found = self.best(known, cluster)
        if found is None:
            raise self.no_plan(known, cluster)
        line, split = self._between_layers(graph, known, cluster, found)
        homes = split.device_of_unit
        return Placement(
            line.facts.placed(homes, split.sequence[0]), self._reason(graph, line, split, cluster)
        )

    def _between_layers(
        self, graph: Graph, known: Facts, cluster: Cluster, found: tuple[Line, Split]
    ) -> tuple[Line, Split]:
        """Return the best split that cuts no layer, if it is about as good as `found`."""
        whole = known.merged(layers(graph, known.groups))
        other = self.best(whole, cluster)
        most_s = found[1].step_s(self.micro_batches) * (1 + self.block_gap)
        return found if other is None or other[1].step_s(self.micro_batches) > most_s else other

    def lines(self, known: Facts, cluster: Cluster, memory_scale: float = 1.0) -> Iterator[Line]:
        """Yield the units in every order that is tried."""
        for order in unit_orders(len(known.groups), known.edges):
            shorter = _shortened(known.reordered(order))
            yield Line(shorter, cluster, self.micro_batches, self.in_flight, memory_scale)

    def best(self, known: Facts, cluster: Cluster) -> tuple[Line, Split] | None:
        """Return the best split, and the order it is of; None when nothing fits."""
        sequences = device_sequences(cluster, self.use_all)
        best: tuple[Line, Split] | None = None
        for line in self.lines(known, cluster):
            split = best_split(line, sequences, self.gap, best[1] if best else None)
            if split is not None:
                best = line, split
        if best is None or self.holds_in_any_order(*best, cluster):
            return best
        most = max(self.in_flight) if isinstance(self.in_flight, tuple) else len(cluster.devices)
        return replace(self, in_flight=most).best(known, cluster)  # no stage ever holds more

    def holds_in_any_order(self, line: Line, split: Split, cluster: Cluster) -> bool:
        """Whether it fits even when stages that do not depend on each other change places."""
        homes = split.device_of_unit
        flights = in_flight_by_device(line.facts, homes, self.micro_batches, self.in_flight)
        return all(
            need.total <= cluster.device[device].memory_bytes
            for device, need in needs(line.facts, homes, flights).items()
        )

    def no_plan(self, known: Facts, cluster: Cluster) -> NoPlanError:
        """Return the error for a model that does not fit, with the arithmetic and a remedy."""

        def fits(facts: Facts, cluster: Cluster, micro_batches: int, scale: float) -> Split | None:
            keeps_all = self.in_flight == self.micro_batches
            in_flight = micro_batches if keeps_all else self.in_flight
            planner = replace(self, micro_batches=micro_batches, in_flight=in_flight)
            line = next(planner.lines(facts, cluster, scale))
            every = device_sequences(cluster, self.use_all)
            tried = [s for s in every if len(s) <= line.count][:_SEQUENCES_TO_EXPLAIN]
            splits = (line.solve(sequence, float("inf")) for sequence in tried)
            return next((split for split in splits if split is not None), None)

        def in_flight(stage: int, stages: int, micro_batches: int) -> int:
            return in_flight_at(stage, stages, micro_batches, self.in_flight)

        if self.in_flight is not None:
            classic = replace(self, in_flight=None)
            if classic.best(known, cluster) is not None:
                fits_as = "fits with fewer micro-batches in flight: --schedule 1f1b"
                return no_plan(
                    _shortened(known), cluster, self.micro_batches, in_flight, fits, fits_as
                )
        return no_plan(_shortened(known), cluster, self.micro_batches, in_flight, fits)

    def _reason(self, graph: Graph, line: Line, split: Split, cluster: Cluster) -> str:
        used, offered = len(split.sequence), len(cluster.devices)
        micro = self.micro_batches
        head = (
            f"{used} of {offered} devices, {' -> '.join(split.sequence)}: about "
            f"{split.step_s(micro):.4g} s a step at {micro} micro-batches, "
            f"{split.most_s:.4g} s each on the busiest device or link; "
            f"within {self.gap:.1%} of the best contiguous split of the orders tried"
        )
        cuts = [describe(graph, line, split, stage) for stage in range(1, len(split.sequence))]
        return "\n".join((head, *cuts))


_SEQUENCES_TO_EXPLAIN = 24


def best_split(
    line: Solver,
    sequences: Iterable[Sequence[str]],
    gap: float,
    best: Split | None = None,
) -> Split | None:
    """Return the split of least `step_s`, or None when none fits or none beats `best`.

    Best-first search over intervals of `most_s`, for each sequence of devices. In an interval
    (low, high), no step is shorter than (least sum under `high`) + (M - 1) low; the interval with
    the least bound is halved next, until the bound is within `gap` of the best split found.

    Args:
        line: the units in one order, or in every order.
        sequences: the devices along the pipeline.
        gap: 0.001: to a thousandth.
        best: a split that is known already.
    """
    micro = line.micro_batches
    start = best
    heap: list[tuple[float, int, float, float, float, Sequence[str]]] = []
    serial = 0

    def consider(split: Split, low_s: float, sequence: Sequence[str]) -> None:
        nonlocal best, serial
        if best is None or split.step_s(micro) < best.step_s(micro) * (1 - 1e-12):
            best = split
        serial += 1
        bound_s = split.sum_s + (micro - 1) * low_s
        entry = (bound_s, serial, low_s, split.most_s, split.sum_s, sequence)
        heapq.heappush(heap, entry)

    for sequence in sequences:
        low_s = line.least_busy_s(sequence)
        split = line.solve(sequence, float("inf"))
        if split is not None:
            consider(split, low_s, sequence)
    for _ in range(MOST_SOLVES):
        if not heap or best is None or heap[0][0] >= best.step_s(micro) * (1 - gap - 1e-12):
            break
        _, _, low_s, high_s, sum_s, sequence = heapq.heappop(heap)
        if high_s <= low_s * (1 + 1e-12):
            continue  # the split that is known has the least sum and the least maximum
        middle_s = (low_s + high_s) / 2
        split = line.solve(sequence, middle_s)
        if split is not None:
            consider(split, low_s, sequence)
        serial += 1
        upper = (sum_s + (micro - 1) * middle_s, serial, middle_s, high_s, sum_s, sequence)
        heapq.heappush(heap, upper)
    return best if best is not start else None


def layers(graph: Graph, groups: Sequence[Sequence[str]]) -> list[range]:
    """Return the runs of units that belong to one layer: `blocks.3` and all below it."""
    layers = [_layer(graph.op[group[0]].module_path) for group in groups]
    starts = [i for i, layer in enumerate(layers) if i == 0 or not layer or layer != layers[i - 1]]
    return [range(a, b) for a, b in pairwise([*starts, len(groups)])]


def _layer(path: str) -> str:
    """Return a module's path up to its first number, else its first part."""
    parts = path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


def _shortened(known: Facts) -> Facts:
    """Merge neighbours until at most `MOST_UNITS` are left; cuts stay where little crosses."""
    if len(known.groups) <= MOST_UNITS:
        return known
    return known.merged(blocks(quiet_cuts(known, MOST_UNITS)))


def describe(graph: Graph, line: Line, split: Split, stage: int) -> str:
    """Return a line on one cut: where it is, and what crosses it."""
    cut = split.cuts[stage]
    op = graph.op[line.facts.groups[cut - 1][-1]]
    forward, backward = line.hop_bytes(cut)
    where = f"{op.name} ({op.source})" if op.source else op.name
    ends = f"{split.sequence[stage - 1]} | {split.sequence[stage]}"
    return f"{ends}: after {where}; {forward:,} bytes forward, {backward:,} back per micro-batch"
