"""`mcmc`: a seeded random walk over placements of any shape, from chain-dp's split on.

Source: FlexFlow (Jia et al., MLSys'19), section 6: Metropolis with delta simulation. It begins with
data parallelism and at random, and stops by the clock; this begins with a good split and stops
after a number of proposals, so that equal seeds give equal plans on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning import canonical

from .chain_dp import ChainDP
from .evaluate import Evaluator, Homes
from .m_etf import METF
from .memory_bound import require_micro_batches
from .walk import improve


@dataclass(frozen=True)
class MCMC:
    """Move groups of ops between devices; keep what makes a step shorter, and now and then more.

    A walk is led by one micro-batch alone, unit by unit, + (micro_batches - 1) x the busiest device
    or link; what it finds is judged stage by stage, as the simulator would, against the start.
    Memory is a hard limit: see `memory_bound`.

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
        cluster = canonical(cluster, costs)
        evaluator = Evaluator(graph, cluster, costs, self.micro_batches, self.in_flight)
        if not evaluator.known.groups:
            return evaluator.placement((), "nothing to split")
        plain = _plain_start(evaluator) if self.unaided else None
        start = plain or self._good_start(evaluator)
        found = improve(evaluator, start, self.proposals, self.seed)
        before_s, after_s = evaluator.step_s(start), evaluator.step_s(found)
        origin = "an equal split" if plain else "a split by chain-dp"
        reason = (
            f"on {', '.join(dict.fromkeys(evaluator.names(found)))}: about {after_s:.4g} s a step, "
            f"{before_s:.4g} s where it began ({origin}); {self.proposals} proposals, "
            f"seed {self.seed}"
        )
        return evaluator.placement(found, reason)

    def _good_start(self, evaluator: Evaluator) -> Homes:
        """Return chain-dp's split, or m-etf's placement where no contiguous split fits.

        Raises:
            NoPlanError: neither fits; with chain-dp's arithmetic.
        """
        graph, cluster, costs = evaluator.graph, evaluator.cluster, evaluator.costs
        chain = ChainDP(self.micro_batches, self.in_flight)
        try:
            return evaluator.homes(chain.partition(graph, cluster, costs))
        except NoPlanError as error:
            other = METF(self.micro_batches, self.in_flight)
            try:
                return evaluator.homes(other.partition(graph, cluster, costs))
            except NoPlanError:
                raise error from None


def _plain_start(evaluator: Evaluator) -> Homes | None:
    """Return the first of these that fits: as many units for each device, or all on one."""
    count, devices = len(evaluator.known.groups), len(evaluator.cluster.devices)
    equal = tuple(unit * devices // count for unit in range(count))
    alone = ((device,) * count for device in range(devices))
    return next((homes for homes in (equal, *alone) if evaluator.fits(homes)), None)
