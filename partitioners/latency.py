"""`latency`: one micro-batch there and back as fast as can be, by a portfolio of methods.

Source: no single method is safe where communication is dear (list schedules lose to one device on
operator graphs), so several are tried and the simulator decides; the list schedules are Baechi's
(SoCC'20) and HEFT's (Topcuoglu et al., 2002) after communication-aware fusion, the improvement is
FlexFlow's delta simulation (MLSys'19), going down only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.planning import canonical
from partitioners.baechi import Ledger, prepared
from partitioners.chain_dp import ChainDP
from partitioners.heft import heft
from partitioners.improve import COLD, Improving, improved
from partitioners.judge import Homes, Judge, require_micro_batches
from partitioners.m_etf import METF
from partitioners.m_sct import MSCT
from partitioners.starts import Method, good_start, one_device_each, tried

_IMPROVED = 3  # so many of the candidates are improved


@dataclass(frozen=True)
class Latency:
    """Place ops so that one micro-batch, alone, takes least: few devices, or branches side by side.

    Candidates: everything on one device, the contiguous split of least sum, and the list schedules
    m-etf, m-sct and HEFT; the best three go down by moves, and of all of these the one is taken
    whose simulated time for one micro-batch is least. Memory is a hard limit: see `room`.

    Attributes:
        micro_batches: per step; for memory, the time is of one alone.
        in_flight: as in `chain-dp`; on a device with several stages all micro-batches may be.
        seed: of the moves tried.
        proposals: moves tried, in all.
    """

    micro_batches: int = 1
    in_flight: int | tuple[int, ...] | None = None
    seed: int = 0
    proposals: int = 3000
    name = "latency"

    def __post_init__(self) -> None:
        require_micro_batches(self.micro_batches)

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        judge = Judge(graph, canonical(cluster, costs), costs, self.micro_batches, self.in_flight)
        if not judge.known.groups:
            return judge.placement((), "nothing to split")
        found = dict[Homes, str]()
        for how, homes in self._candidates(judge):
            found.setdefault(homes, how)
        if not found:
            start = good_start(judge)  # raises, with the arithmetic
            found[start] = "the chain-dp split"
        ranked = sorted(found, key=lambda homes: judge.step_s(homes, 1))
        search = Improving(
            self.proposals // _IMPROVED, self.seed, walks=2, heat=COLD, micro_batches=1
        )
        for homes in ranked[:_IMPROVED]:
            found.setdefault(improved(judge, homes, search), f"{found[homes]}, improved")
        best = min(found, key=lambda homes: judge.step_s(homes, 1))
        return judge.placement(best, self._reason(judge, best, found[best], len(found)))

    def _candidates(self, judge: Judge) -> Iterator[tuple[str, Homes]]:
        """Yield what fits, with a name for it."""
        for homes in one_device_each(judge):
            if judge.fits(homes):
                yield "all on one device", homes
        for how, method in self._methods():
            for homes in tried(judge, [method]):
                yield how, homes
        listed = _heft(judge)
        if listed is not None:
            yield "HEFT", listed

    def _methods(self) -> Iterator[tuple[str, Method]]:
        micro, flight = self.micro_batches, self.in_flight
        yield "the contiguous split of least sum", ChainDP(1, flight)
        yield "the chain-dp split", ChainDP(micro, flight)
        yield "m-etf", METF(micro, flight)
        yield "m-sct", _WithoutScipy(MSCT(micro, flight))

    def _reason(self, judge: Judge, homes: Homes, how: str, candidates: int) -> str:
        return (
            f"on {judge.used(homes)}: about {judge.step_s(homes, 1):.4g} s for one micro-batch, by "
            f"{how}; the best of {candidates} candidates (seed {self.seed})"
        )


@dataclass(frozen=True)
class _WithoutScipy:
    """A method that needs an extra: where it is not installed, it finds nothing."""

    method: Method

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        try:
            return self.method.partition(graph, cluster, costs)
        except InputError as error:
            raise NoPlanError(error.what, code=error.code, help=error.help) from error


def _heft(judge: Judge) -> Homes | None:
    """Return HEFT's placement of the fused units, if it fits."""
    ready = prepared(judge.graph, judge.cluster, judge.costs, judge.micro_batches, judge.in_flight)
    homes = heft(ready.jobs, Ledger(ready))
    if -1 in homes:
        return None
    names = judge.names(homes)
    placed = Placement(ready.known.placed(names, names[0]))
    found = judge.homes(placed)
    return found if judge.fits(found) else None
