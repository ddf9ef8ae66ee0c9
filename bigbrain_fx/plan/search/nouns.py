"""Inputs, trials and results of a search. Plain data, part of plan.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import InputError

Objective: TypeAlias = Literal["throughput", "latency", "memory", "cost"]
Effort: TypeAlias = Literal["fast", "normal", "high"]
CutAt: TypeAlias = Literal["blocks", "anywhere"]

OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "memory", "cost")
EFFORTS: tuple[Effort, ...] = ("fast", "normal", "high")
MOST_OTHERS = 5
MEMORY_SLACK = 1.1
"""`memory` may cost this much of the best step time."""
LATENCY_MICRO_BATCHES = 2
"""`latency` splits a batch into no more than so many micro-batches."""


MANY_DEVICES = 32
"""More are a long pipeline, for which more and smaller micro-batches are looked at."""


@dataclass(frozen=True)
class Trial:
    """One way to run the model, before anybody knows what it takes.

    Attributes:
        partitioner: who placed the ops; "pipeline" is the search itself.
        in_flight: as in `schedule.build`; None leaves it to the schedule.
        recompute: stages that run their forward again before the backward, by number.
    """

    partitioner: str
    placement: Placement
    schedule: str
    micro_batches: int
    in_flight: tuple[int, ...] | None = None
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True)
class Score:
    """Simulated result of a trial.

    `peak_bytes` is of tensors, `memory_share` the largest share of a device's memory that its
    process needs; both as `memory_check` has them. `devices` are in the order of their first stage.
    """

    step_s: float
    devices: tuple[str, ...]
    peak_bytes: tuple[int, ...]
    memory_share: float
    is_chain: bool


Judge: TypeAlias = Callable[[Trial], Score]
"""Simulate a trial. Raises NoPlanError when it does not fit, InputError when it cannot be run."""


@dataclass(frozen=True)
class Ask:
    """Subject and inputs of a search.

    Attributes:
        graph: as captured.
        cluster: as the user described it, with the rates of devices that all compute at once.
        costs: rows -> the costs of `graph.at(rows)`.
        micro_batches: the numbers of micro-batches to try.
        schedule: the one that was asked for; None: any that can run the stages.
        in_flight: likewise.
        place: (name, micro-batches) -> a partitioner's placement. Raises NoPlanError.
        judge: costs of a trial.
        known: trials to score besides, of an earlier plan, say.
        recompute: whether stages may run their forward again to save memory.
        apart: the share that a plan must be faster by; of plans nearer than that the simplest is
            taken: fewest devices, then a chain, then most blocks whole.
        scope: common description of all plans of this search; for the text of bounds.
        cut_at: "blocks" cuts no layer of the model; "anywhere" prefers none that cuts none.
        halves: schedules of split backwards to try, by name; whether one is for lines only.
        split: times its forecast a step of theirs counts, which is known less well.
    """

    graph: Graph
    cluster: Cluster
    costs: Callable[[int], Costs]
    micro_batches: tuple[int, ...]
    place: Callable[[str, int], Placement]
    judge: Judge
    schedule: str | None = None
    in_flight: tuple[int, ...] | None = None
    objective: Objective = "throughput"
    effort: Effort = "normal"
    known: tuple[Trial, ...] = ()
    recompute: bool = False
    apart: float = 0.0
    scope: str = "of one replica"
    cut_at: CutAt | None = None
    halves: Mapping[str, bool] = field(default_factory=dict)
    split: float = 1.0

    def rows(self, micro_batches: int) -> int:
        """Return the rows of a micro-batch."""
        return self.graph.batch // micro_batches


@dataclass(frozen=True)
class Candidate:
    """A trial and what became of it; `why` says why it lost, or was refused.

    `step_s` is None when it was refused. `peak_bytes` has one entry for each of `devices`.
    """

    partitioner: str
    devices: tuple[str, ...]
    schedule: str
    micro_batches: int
    in_flight: tuple[int, ...] | None = None
    recompute: tuple[int, ...] = ()
    step_s: float | None = None
    peak_bytes: tuple[int, ...] = ()
    memory_share: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Bound:
    """No plan that it `covers` is faster than `step_s`."""

    covers: str
    step_s: float


@dataclass(frozen=True)
class Search:
    """Result of `auto`.

    Attributes:
        others: the best of the rest, the best first, at most 5.
        refused: trials that did not fit, at most 5.
        bounds: the lower bound of the step, for these costs; none where Ctrl-C ended it.
        looked_at: splits that the dynamic program compared.
        simulated: trials that the simulator ran.
        stopped: whether Ctrl-C ended it: then this is the best so far, without bounds.
    """

    objective: Objective
    effort: Effort
    winner: Candidate
    others: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    bounds: tuple[Bound, ...]
    looked_at: int
    simulated: int
    stopped: bool = False

    @property
    def gaps(self) -> tuple[float, ...]:
        """How much slower the winner is than each of the bounds, as a share: 0.05 is 5 %."""
        step_s = self.winner.step_s or 0.0
        return tuple(step_s / bound.step_s - 1 if bound.step_s else 0.0 for bound in self.bounds)

    def __str__(self) -> str:
        if self.stopped:
            return "stopped by Ctrl-C: the best so far"
        return "\n".join(
            f"no {bound.covers} is faster than {bound.step_s:.4g} s a step: "
            f"this plan is within {gap:.1%}"
            for bound, gap in zip(self.bounds, self.gaps, strict=True)
        )


@dataclass(frozen=True)
class Compared:
    """Replicas or tensor groups that a plan was compared with, and why they were not chosen.

    `step_s` is None where they were not planned, or are no plan.
    """

    what: str
    step_s: float | None
    why: str


@dataclass(frozen=True)
class Limits:
    """How much work an effort may do; counted, never timed, so that equal input gives equal plans.

    Attributes:
        cuts: places where a chain may be cut; others are left out, those where most crosses first.
        steps: of the dynamic program (one stage of one split) for each number of micro-batches.
        sequences: orders of devices.
        shortlist: splits that are simulated.
        instructions: that may be simulated for the shortlist, about.
        visits: forwards and backwards that may be played to shift the cuts of a split.
        counts: numbers of micro-batches, where more divide the batch.
        halves: lines to try with split backwards, for each number of micro-batches.
    """

    cuts: int
    steps: int
    sequences: int
    shortlist: int
    instructions: int
    visits: int
    counts: int
    halves: int


LIMITS: Mapping[Effort, Limits] = {
    "fast": Limits(192, 600, 40, 4, 200_000, 10_000, 4, 1),
    "normal": Limits(320, 2_000, 200, 8, 400_000, 70_000, 5, 2),
    "high": Limits(640, 40_000, 2000, 32, 10_000_000, 1_000_000, 1000, 8),
}


def require_known(objective: str, effort: str) -> None:
    """Raise InputError for a word that is not in `OBJECTIVES` or `EFFORTS`."""
    for what, word, known in (("objective", objective, OBJECTIVES), ("effort", effort, EFFORTS)):
        if word not in known:
            raise InputError(
                f"there is no {what} '{word}'",
                code="BX1321",
                help=f"choose one of {', '.join(known)}",
            )


# ------------------------------------------------------------------------- numbers of micro-batches


INSTRUCTIONS = 6
"""Of a stage and micro-batch: forward, backward, and the messages of both."""


def numbers(ask: Ask) -> tuple[int, ...]:
    """Return the numbers of micro-batches to try; for `latency` few, or the fewest there are.

    Of very many devices those whose programs, on all of them, are soon simulated.

    Raises:
        InputError: no such objective or effort.
    """
    require_known(ask.objective, ask.effort)
    devices, known, most = len(ask.cluster.devices), ask.micro_batches, most_micro_batches(ask)
    every = tuple(n for n in known if n <= most) or (min(known),)
    if ask.objective != "latency":
        around, at_most = 4 * devices, LIMITS[ask.effort].counts
        return spread(every, around, at_most, many=devices > MANY_DEVICES)
    few = tuple(n for n in every if n <= LATENCY_MICRO_BATCHES)
    return few or (min(every),)


def most_micro_batches(ask: Ask) -> int:
    """Return the most micro-batches whose programs, on all devices, are soon simulated."""
    return LIMITS[ask.effort].instructions // (INSTRUCTIONS * len(ask.cluster.devices))


def spread(every: Sequence[int], around: int, most: int, *, many: bool) -> tuple[int, ...]:
    """Return the least number, and those nearest to `around` by ratio, `most` at all.

    Of `many` devices the largest instead. One micro-batch keeps a long pipeline idle, and many in
    flight on one device fit only where they are small.
    """
    if len(every) <= most:
        return tuple(every)
    end = every[-1] if many else every[0]
    others = (n for n in every if n != end)
    nearest = sorted(others, key=lambda n: (max(n / around, around / n), n))
    return tuple(sorted((end, *nearest[: most - 1])))


# ------------------------------------------------------------------------------------------------
# What a plan has to keep to, beside the memory of devices: money and time. Nouns only.


@dataclass(frozen=True)
class Goals:
    """Limits of a plan, of which None is none.

    Attributes:
        tokens: of all training, for which money and time are counted; rows, where no input is a row
            of tokens.
        max_usd: that all of them may cost.
        max_hour_usd: that devices and messages may cost by the hour.
        min_per_s: tokens, or rows, a second at least.
        deadline_s: in which all of them have to be computed.
    """

    tokens: float | None = None
    max_usd: float | None = None
    max_hour_usd: float | None = None
    min_per_s: float | None = None
    deadline_s: float | None = None

    @property
    def limits(self) -> bool:
        """Whether anything is limited."""
        return any(
            each is not None
            for each in (self.max_usd, self.max_hour_usd, self.min_per_s, self.deadline_s)
        )

    @property
    def needs_prices(self) -> bool:
        """Whether money is limited."""
        return self.max_usd is not None or self.max_hour_usd is not None


@dataclass(frozen=True)
class Offer:
    """Some devices, and what the best plan on them takes and costs; None where there is none.

    Attributes:
        devices: that it uses.
        step_s: of its forecast.
        step_usd: of a step; None, too, where a device has no price.
        why: against the plan that was chosen, or why there is no plan.
    """

    devices: tuple[str, ...]
    step_s: float | None = None
    step_usd: float | None = None
    why: str = ""
