"""`ideal-dp`: the best contiguous split over every order of the ops, by ideals.

Source: Tarnawski et al., NeurIPS'20, section 4 (dynamic programming over ideals, with the result of
a chain as the bound); with the objective, the devices and the links of `chain_dp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import (
    BestFirst,
    Cutter,
    InFlight,
    Line,
    Setting,
    Split,
    Work,
    whole_layers,
    work,
)
from partitioners.chain_dp import MOST_STEPS, ChainDP, describe
from partitioners.ideals import ideals
from partitioners.lattice import Lattice

MOST_IDEALS = 1500
MOST_WORK = 1e9  # pairs of ideals x stages of all sequences of devices


@dataclass(frozen=True)
class _Found:
    """A split, the order it is of, and how far the search that found it went."""

    cutter: Cutter
    split: Split
    searched: str


@dataclass(frozen=True)
class IdealDP:
    """Split the ops into one convex piece per device: chain-dp's objective, in every order at once.

    `chain-dp` tries three topological orders; this tries every set of ops that the first stages
    could have run (an ideal), so that branches may be divided in any way. Where there are more than
    1,500 such sets, whole layers are taken as one; where there are still more, the answer is
    chain-dp's, and says so. The orders of devices are chain-dp's; when the graph
    has so many ideals that trying all of them would take minutes, those that come out best on the
    chain are tried.

    Attributes:
        micro_batches: per step.
        in_flight: as in `chain-dp`.
        use_all: use every device, even where fewer are faster.
        gap: stop when the split is proven to be within this share of the best one.
    """

    micro_batches: int = 8
    in_flight: InFlight = None
    use_all: bool = False
    gap: float = 1e-3
    name = "ideal-dp"

    def __post_init__(self) -> None:
        self._chain  # noqa: B018  # refuses what chain-dp refuses

    @property
    def _chain(self) -> ChainDP:
        return ChainDP(self.micro_batches, self.in_flight, self.use_all, self.gap)

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known = work(graph, costs)
        if not known.groups:
            return Placement(known.placed((), cluster.devices[0].name), "nothing to split")
        found = self._best(graph, known, cluster)
        if found is None:
            raise self._chain.no_plan(known, cluster)
        split = found.split
        line = found.cutter.line
        placed = line.work.placed(line.homes(split), split.sequence[0])
        return Placement(placed, self._reason(graph, found, cluster))

    def _best(self, graph: Graph, known: Work, cluster: Cluster) -> _Found | None:
        start = self._chain.best(known, cluster)
        whole, sets = known, ideals(len(known.groups), known.edges, MOST_IDEALS)
        searched = "of all orders of ops"
        if sets is None:
            whole = whole_layers(graph, known)
            sets = ideals(len(whole.groups), whole.edges, MOST_IDEALS)
            searched = "of all orders of layers"
        if sets is None:
            few = f"of three orders of ops: more than {MOST_IDEALS:,} sets could come first"
            return _Found(*start, few) if start else None
        lattice = Lattice(whole, sets, cluster, self.micro_batches, self.in_flight)
        sequences, note = self._sequences(lattice, cluster, start)
        search = BestFirst(lattice, start[1] if start else None)
        search.run(sequences, self.gap, MOST_STEPS)
        split = search.best
        if split is None or (start and split is start[1]):
            return _Found(*start, searched + note) if start else None
        order, cuts = lattice.order(split)
        setting = Setting(cluster, self.micro_batches, in_flight=self.in_flight)
        cutter = Cutter(Line(whole, order, whole.count), setting)
        better = cutter.measure(split.sequence, cuts)
        if self._chain.holds_in_any_order(cutter, better, cluster):
            return _Found(cutter, better, searched + note)
        most = max(self.in_flight) if isinstance(self.in_flight, tuple) else len(cluster.devices)
        return replace(self, in_flight=most)._best(graph, known, cluster)

    def _sequences(
        self, lattice: Lattice, cluster: Cluster, start: tuple[Cutter, Split] | None
    ) -> tuple[Sequence[tuple[str, ...]], str]:
        """Return the orders of devices to try, and a remark when they are not all."""
        cutter = start[0] if start else next(self._chain.cutters(lattice.known, cluster))
        every = self._chain.sequences(cutter)
        pairs = len(lattice.sets) ** 2
        if start is None or pairs * sum(map(len, every)) <= MOST_WORK:
            return every, ""
        bound_s = {}
        for sequence in every:
            split = cutter.solve(sequence, float("inf"))
            if split is not None:
                busy_s = cutter.least_busy_s(sequence)
                bound_s[sequence] = split.sum_s + (self.micro_batches - 1) * busy_s
        ranked = sorted(bound_s, key=lambda sequence: bound_s[sequence])
        kept = max(1, int(MOST_WORK / pairs / len(cluster.devices)))
        chosen = list(dict.fromkeys([start[1].sequence, *ranked[:kept]]))
        return chosen, f", {len(chosen)} of {len(every)} orders of devices"

    def _reason(self, graph: Graph, found: _Found, cluster: Cluster) -> str:
        split, micro = found.split, self.micro_batches
        head = (
            f"{len(split.sequence)} of {len(cluster.devices)} devices, "
            f"{' -> '.join(split.sequence)}: about {split.step_s(micro):.4g} s a step at {micro} "
            f"micro-batches, {split.most_s:.4g} s each on the busiest device or link; within "
            f"{self.gap:.1%} of the best contiguous split {found.searched}"
        )
        stages = range(1, len(split.sequence))
        return "\n".join(
            (head, *(describe(graph, found.cutter.line, split, stage) for stage in stages))
        )
