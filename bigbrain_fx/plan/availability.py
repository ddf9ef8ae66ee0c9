"""A plan, and periods of available devices -> computation and costs of a training over time.

A change of devices has the product's own effect:

    no device of the plan is lost   it goes on; with others that pay, `resplit` from a checkpoint
    replicas are left (--elastic)   they go on with all micro-batches, and begin the step again
    otherwise                       work since the last checkpoint is undone; `resplit`

Where no plan fits the remaining devices, nothing is computed until devices are back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, TypeAlias

from bigbrain_fx.core import Period
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import least_gap
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.prices import HOUR_S, money, per_step
from bigbrain_fx.plan.recovery import Assumptions, choose
from bigbrain_fx.plan.replanning import replan
from bigbrain_fx.plan.replicas import only

How: TypeAlias = Literal["start", "same", "elastic", "resplit", "wait"]
_ORDERS = ("micro", "tree")
"""All-reduce orders with which replicas go on without one of them."""


@dataclass(frozen=True)
class Stretch:
    """Computation and costs of one period.

    Attributes:
        how: the reaction at its beginning.
        devices: that compute; none, where nothing fits.
        stopped_s: until training goes on.
        undone_s: of work that was lost at its beginning.
        steps: that were done in it, less those that were undone.
        usd: for the devices that compute, and their messages; None where a price is missing.
        planning_s: of processor time that planning anew took.
    """

    period: Period
    how: How
    devices: tuple[str, ...]
    step_s: float | None
    stopped_s: float
    undone_s: float
    steps: float
    usd: float | None
    planning_s: float


@dataclass(frozen=True)
class OverTime:
    """All periods. `per_step`: tokens, or rows, of a step."""

    stretches: tuple[Stretch, ...]
    per_step: int
    checkpoint_s: float

    @property
    def computed(self) -> float:
        """Tokens, or rows, that count in the end."""
        return sum(each.steps for each in self.stretches) * self.per_step

    @property
    def usd(self) -> float | None:
        """Return the costs in US dollars; None where a price is missing."""
        each = [stretch.usd for stretch in self.stretches]
        return None if None in each else sum(usd for usd in each if usd is not None)

    @property
    def lost_s(self) -> float:
        """Seconds without training, and those of steps that were undone."""
        return sum(each.stopped_s + each.undone_s for each in self.stretches)

    @property
    def planning_s(self) -> float:
        """Processor seconds of the longest planning."""
        return max(each.planning_s for each in self.stretches)


def over_time(plan: Plan, periods: Sequence[Period]) -> OverTime:
    """Follow a training through periods of different devices.

    Args:
        plan: for all devices of its cluster.
        periods: one at least, without a gap between them.

    Raises:
        InputError: the plan is for inference.
    """
    if plan.mode != "train":
        raise InputError(
            "--trace is for training",
            code="BX1348",
            help="estimate the model without --mode eval: inference loses nothing with a device",
        )
    changes = max(1, len(periods) - 1)
    mtbf_s = (periods[-1].until_h - periods[0].from_h) * HOUR_S / changes
    clock = _Clock(plan, Assumptions(mtbf_s, host_share=1.0))
    return OverTime(tuple(clock.pass_all(periods)), per_step(plan.graph), clock.checkpoint_s)


@dataclass(frozen=True)
class _Change:
    """Costs of a change of devices: seconds until training goes on, and work that is undone."""

    how: How
    stopped_s: float = 0.0
    undone_s: float = 0.0
    undone_steps: float = 0.0


@dataclass
class _Clock:
    """A training as it goes: mutable, used once.

    Attributes:
        plan: the first one, for all devices.
        now: the plan that runs; None while nothing fits.
        since_s: of work since the last checkpoint.
        left: replicas that still run, of a plan of which some were lost.
    """

    plan: Plan
    assumptions: Assumptions
    now: Plan | None = None
    since_s: float = 0.0
    left: int = 0
    known: dict[frozenset[str], Plan | None] = field(default_factory=dict)
    planning_s: float = 0.0
    lost: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        every = choose(self.plan, self.assumptions)
        self.write_s = every.commit_s
        steps = every.commit_every or 1
        self.checkpoint_s = steps * self.plan.forecast.step_s

    def pass_all(self, periods: Sequence[Period]) -> Iterator[Stretch]:
        """Yield what each period gives."""
        for period in periods:
            self.planning_s = 0.0
            yield self._pass(period, self._change(frozenset(period.devices)))

    # ------------------------------------------------------------------ at a change

    def _change(self, there: frozenset[str]) -> _Change:
        """Go over to the devices that are there."""
        if self.now is None:
            is_first = not self.known
            if self._take(there) is None:
                return _Change("wait")
            return _Change("start") if is_first else _Change("resplit", self._reading_s)
        used = frozenset(self.now.stages.devices) - self.lost
        if used <= there:
            return self._joined(there)
        gone = self._without(self.now, self.lost | (used - there))
        if gone is not None:
            self.lost, self.left = gone
            return _Change("elastic", self.assumptions.reform_s, self._step_s(self.now), 1.0)
        undone_s, self.since_s = self.since_s, 0.0
        steps = undone_s / self._step_s(self.now)
        if self._take(there) is None:
            return _Change("wait", 0.0, undone_s, steps)
        return _Change("resplit", self._reading_s, undone_s, steps)

    def _joined(self, there: frozenset[str]) -> _Change:
        """Use devices that have come where a step is shorter by more than forecasts are off."""
        assert self.now is not None
        own_s, other = self._step_s(self.now), self._planned(there)
        gap = 1 + least_gap(self.plan.cluster)
        if other is None or other.forecast.step_s * gap >= own_s:
            return _Change("same")
        self._take(there)
        self.since_s = 0.0  # a checkpoint is written first
        return _Change("resplit", self.write_s + self._reading_s)

    @property
    def _reading_s(self) -> float:
        """Seconds to start processes, and to read a checkpoint."""
        return self.assumptions.cold_s + self.write_s

    def _take(self, there: frozenset[str]) -> Plan | None:
        self.now, self.lost = self._planned(there), frozenset()
        self.left = 0 if self.now is None else self.now.stages.replicas
        return self.now

    def _without(self, plan: Plan, lost: frozenset[str]) -> tuple[frozenset[str], int] | None:
        """Return all devices of replicas that are lost, and how many are whole; None if none is."""
        stages = plan.stages
        if not stages.have_peers or stages.sum_order not in _ORDERS:
            return None
        of: dict[int, set[str]] = {}
        for stage in stages.stages:
            of.setdefault(stage.replica, set()).add(stage.device)
        whole = [own for own in of.values() if not own & lost]
        broken = frozenset(name for own in of.values() if own & lost for name in own)
        return (broken, len(whole)) if whole else None

    def _planned(self, there: frozenset[str]) -> Plan | None:
        """Return the plan for some devices; None where the model does not fit on them."""
        if there not in self.known:
            begun_s = time.process_time()
            self.known[there] = self._replanned(there)
            self.planning_s = time.process_time() - begun_s
        return self.known[there]

    def _replanned(self, there: frozenset[str]) -> Plan | None:
        if frozenset(self.plan.stages.devices) <= there:
            return self.plan
        search = self.plan.search and replace(self.plan.search, effort="fast")
        cluster = only(self.plan.cluster, there)
        try:
            return replan(replace(self.plan, search=search), cluster)
        except (NoPlanError, InputError):
            return None

    # ------------------------------------------------------------------ between changes

    def _step_s(self, plan: Plan) -> float:
        """Return a step's seconds: replicas that are left have the micro-batches of all."""
        count, micro = plan.stages.replicas, plan.micro_batches
        return plan.forecast.step_s * ceil(micro / self.left) / ceil(micro / count)

    def _pass(self, period: Period, change: _Change) -> Stretch:
        lasts_s = (period.until_h - period.from_h) * HOUR_S
        about = change.undone_s, -change.undone_steps
        if self.now is None:
            return Stretch(period, change.how, (), None, lasts_s, *about, 0.0, self.planning_s)
        step_s, stopped_s = self._step_s(self.now), min(change.stopped_s, lasts_s)
        done = (lasts_s - stopped_s) / step_s
        self.since_s = (self.since_s + lasts_s - stopped_s) % self.checkpoint_s
        names = tuple(name for name in self.now.stages.devices if name not in self.lost)
        paid = money(self.now, names)
        usd = None if paid is None else paid.hour_usd * lasts_s / HOUR_S + paid.sent_usd * done
        found = Stretch(period, change.how, names, step_s, stopped_s, *about, usd, self.planning_s)
        return replace(found, steps=found.steps + done)
