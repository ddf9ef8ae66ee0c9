"""`mcmc`: a seeded random walk over placements of any shape, from chain-dp's split on.

Source: FlexFlow (Jia et al., MLSys'19), section 6: Metropolis with delta simulation. It begins with
data parallelism and at random, and stops by the clock; this begins with a good split and stops
after a number of proposals, so that equal seeds give equal plans on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import canonical
from partitioners.improve import Improving, improved
from partitioners.judge import Judge, require_micro_batches
from partitioners.starts import start_of


@dataclass(frozen=True)
class MCMC:
    """Move groups of ops between devices; keep what makes a step shorter, and now and then more.

    A walk is led by one micro-batch alone, unit by unit, + (micro_batches - 1) x the busiest device
    or link; what it finds is judged stage by stage, as the simulator would, against the start.
    Memory is a hard limit: see `room`.

    Attributes:
        micro_batches: per step.
        in_flight: as in `chain-dp`; on a device with several stages all micro-batches may be.
        seed: of the walks; equal seeds give equal placements.
        proposals: moves tried.
        unaided: begin with an equal split, not with chain-dp's: what the walk finds by itself.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    seed: int = 0
    proposals: int = 4000
    unaided: bool = False
    name = "mcmc"

    def __post_init__(self) -> None:
        require_micro_batches(self.micro_batches)

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        judge = Judge(graph, canonical(cluster, costs), costs, self.micro_batches, self.in_flight)
        if not judge.known.groups:
            return judge.placement((), "nothing to split")
        start, origin = start_of(judge, self.unaided)
        found = improved(judge, start, Improving(self.proposals, self.seed))
        before_s, after_s = judge.step_s(start), judge.step_s(found)
        reason = (
            f"on {judge.used(found)}: about {after_s:.4g} s a step, {before_s:.4g} s where it "
            f"began ({origin}); {self.proposals} proposals, seed {self.seed}"
        )
        return judge.placement(found, reason)
