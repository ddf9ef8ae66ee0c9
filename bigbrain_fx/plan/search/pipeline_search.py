"""The verb: try partitioners, devices, schedules, micro-batches; simulate; keep the best."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bigbrain_fx.core import Cluster, Costs, Graph, Placement, micro_text
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.memory_check import for_tensors
from bigbrain_fx.plan.search.candidates import (
    Ranking,
    Scored,
    by_pace,
    is_tight,
    paced,
    settings,
    shifted,
    splits,
)
from bigbrain_fx.plan.search.nouns import (
    INSTRUCTIONS,
    LIMITS,
    Ask,
    Bound,
    Search,
    Trial,
    numbers,
)
from bigbrain_fx.planning import (
    Array,
    Cutter,
    Found,
    Line,
    Setting,
    Split,
    Work,
    canonical,
    device_orders,
    least_busy_s,
    nearest,
    polished,
    unit_orders,
    whole_layers,
    work,
)

PIPELINE = "pipeline"
SIMPLE = "naive"
"""A partitioner that is asked, too: what it places costs a trial, and is the simplest."""
_CUTS_PER_DEVICE = 6
_NEAREST = 24
"""Sequences of devices to look at for a split that needs the least memory."""
_WIDE = 64
"""Devices up to which partitioners of chains are asked for every number of micro-batches."""
_MOST_NEAREST = 4
"""Such splits to simulate, with those beside them."""


def search_pipelines(ask: Ask) -> tuple[Trial, Search]:
    """Run a search: see `bigbrain_fx.plan.search.search`."""
    search = PipelineSearch(ask)
    stopped = search.run()
    chosen = search.ranking.chosen()
    if chosen is None:
        raise search.ranking.first_error or NoPlanError(
            "no plan can be run as asked", code="BX1320"
        )
    winner, others = search.ranking.table()
    found = Search(
        ask.objective,
        ask.effort,
        winner,
        others,
        tuple(search.ranking.refused),
        () if stopped else (search.bound(),),
        search.looked_at,
        search.ranking.simulated,
        stopped,
    )
    return chosen.trial, found


@dataclass(frozen=True)
class MicroBatchCase:
    """The graph for one number of micro-batches: its units, the lines, what memory there is.

    `least` is its work where no device slows another: lower bounds are of that.
    """

    micro_batches: int
    work: Work
    least: Work
    lines: tuple[Line, ...]
    left: Cluster


class PipelineSearch:
    """One search: mutable, used once.

    Attributes:
        looked_at: splits that were compared without simulating them.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask, self.limits = ask, LIMITS[ask.effort]
        counts = numbers(ask)
        costs = ask.costs(ask.rows(counts[0]))
        self.ask = ask = replace(ask, cluster=canonical(ask.cluster, costs))
        self.ranking = Ranking(ask)
        self.looked_at = 0
        self.at = tuple(self._prepared(count) for count in counts)
        self._floors: dict[int, float] = {}

    def run(self) -> bool:
        """Search; return whether Ctrl-C ended it, with a plan at hand.

        Raises:
            KeyboardInterrupt: there is none yet.
        """
        try:
            self.pipelines()
            self.simple()
            self.split_backwards()
        except KeyboardInterrupt:
            if self.ranking.best() is None:
                raise
            return True
        return False

    def _prepared(self, count: int) -> MicroBatchCase:
        graph = self.ask.graph.at(self.ask.rows(count))
        costs = self.ask.costs(self.ask.rows(count))
        least = self._work(graph, costs.alone or costs)
        taking_turns = count == 1 or costs.alone is None  # then nobody slows another
        found = least if taking_turns else self._work(graph, costs)
        orders = unit_orders(found.count, found.edges)
        cuts = max(self.limits.cuts, _CUTS_PER_DEVICE * len(self.ask.cluster.devices))
        lines = tuple(Line(found, order, cuts) for order in orders)
        return MicroBatchCase(
            count, found, least, lines, for_tensors(self.ask.cluster, graph, count)
        )

    def _work(self, graph: Graph, costs: Costs) -> Work:
        found = work(graph, costs)
        return whole_layers(graph, found) if self.ask.cut_at == "blocks" else found

    # ------------------------------------------------------------------ contiguous

    def pipelines(self) -> None:
        """Simulate the most promising splits into one piece per device."""
        found = [entry for at in self.at if at.work.count for entry in self._splits(at)]
        for trial in self.ask.known:
            self.ranking.consider(trial)
        shortlist = self._shortlist(found)
        for entry in dict.fromkeys(shortlist):
            self._simulate(entry)
        if self.ask.objective != "memory":
            better = sorted(map(self._polished, shortlist), key=by_pace)
            for entry in better[: max(1, len(shortlist) // 3)]:
                self._simulate(entry)
        if self.ranking.best() is None:
            self._nearest()

    def _nearest(self) -> None:
        """Simulate the split of least memory, one micro-batch in flight, and splits beside it.

        Splits under the limit may miss it, since their memory is an upper bound.
        """
        found: list[tuple[float, int, Line, Split]] = []
        for at in self.at:
            setting = Setting(at.left, at.micro_batches, at_most=1)
            for line in at.lines if at.work.count else ():
                every = device_orders(
                    self.ask.cluster, self.limits.sequences, line.rough(at.micro_batches)
                )
                for share, split in nearest(line, setting, every[:_NEAREST]):
                    found.append((share, at.micro_batches, line, split))
        found.sort(key=lambda entry: entry[0])
        for _, micro, line, split in found[:_MOST_NEAREST]:
            for other in (split, *shifted(split)):
                ones = (1,) * len(other.sequence)
                self._simulate(Found(line, other, micro, ones, (), 0.0))
            if self.ranking.best() is not None:
                return

    def _splits(self, at: MicroBatchCase) -> Iterator[Found]:
        tight = is_tight(at.lines[0], Setting(at.left, at.micro_batches))
        for_memory = self.ask.objective == "memory"
        asked = settings(at.left, at.micro_batches, self.ask.recompute, tight, for_memory)
        own = asked[0]
        steps = self.limits.steps // (len(at.lines) + len(asked) - 1)
        rough = at.lines[0].rough(at.micro_batches)
        sequences = device_orders(self.ask.cluster, self.limits.sequences, rough)
        for i, line in enumerate(at.lines):
            for setting in asked if i == 0 else asked[:1]:
                ranked, compared = splits(line, setting, sequences, steps)
                self.looked_at += compared
                real = replace(own, recompute=setting.recompute)
                judged = setting if for_memory else real
                most = self.limits.shortlist if setting is own else 2
                yield from paced(line, judged, ranked, most, self.ask.in_flight)

    def _polished(self, entry: Found) -> Found:
        at = next(at for at in self.at if at.micro_batches == entry.micro_batches)
        setting = Setting(at.left, at.micro_batches, bool(entry.recompute), at_most=1)
        cutter = Cutter(entry.line, setting)
        return polished(cutter, entry, self.limits.visits)

    def _shortlist(self, found: Sequence[Found]) -> list[Found]:
        """Return the fastest, and the fastest of each number of micro-batches and devices.

        For `memory`, all: which of them needs least is only known when they are simulated.
        """
        ranked = sorted(found, key=by_pace)
        firsts: dict[tuple[object, ...], Found] = {}
        for entry in ranked:
            key = (entry.micro_batches, entry.split.sequence, bool(entry.recompute))
            firsts.setdefault(key, entry)
        most = self.limits.shortlist
        if ranked:
            each = INSTRUCTIONS * len(ranked[0].split.sequence) * ranked[0].micro_batches
            most = min(most, max(2, self.limits.instructions // each))
        if self.ask.objective == "memory":
            most *= 4
        several = sorted(firsts.values(), key=by_pace)[: max(1, most // 2)]
        return list(dict.fromkeys([*several, *ranked]))[:most]

    def _simulate(self, entry: Found) -> None:
        asked, schedule = self.ask.in_flight, self.ask.schedule or self._chain
        alternates = schedule == "1f1b"
        in_flight = asked or (entry.in_flight if alternates else None)
        placement, micro = self._placement(entry), entry.micro_batches
        trial = Trial(PIPELINE, placement, schedule, micro, in_flight, entry.recompute)
        found = self.ranking.consider(trial)
        if not alternates or (found is not None and not _is_held_back(in_flight, micro)):
            return
        classic = self.ranking.consider(replace(trial, in_flight=asked))
        if found is None and classic is None and in_flight and not asked:
            self.ranking.consider(replace(trial, in_flight=(1,) * len(in_flight)))

    @property
    def _chain(self) -> str:
        """The schedule of a chain where none is asked for."""
        return "1f1b" if self.ask.graph.training else "forward"

    def _placement(self, entry: Found) -> Placement:
        line, split = entry.line, entry.split
        micro = entry.micro_batches
        reason = (
            f"{len(split.sequence)} of {len(self.ask.cluster.devices)} devices, "
            f"{' -> '.join(split.sequence)}: about {entry.step_s:.4g} s a step at "
            f"{micro_text(micro)}, {split.most_s:.4g} s each on the busiest device or link"
        )
        return Placement(line.work.placed(line.homes(split)), reason)

    # ------------------------------------------------------------------ the simplest

    def simple(self) -> None:
        """Simulate even parts in the file's order, with numbers of micro-batches that may be best.

        Even parts cut layers, and are left out where that is not wanted.
        """
        best = self.ranking.best()
        is_few = len(self.ask.cluster.devices) <= _WIDE
        for at in self._promising() if self.ask.cut_at != "blocks" else ():
            if is_few or best is None or at.micro_batches == best.trial.micro_batches:
                self._simple(at)

    def _promising(self) -> Iterator[MicroBatchCase]:
        """Yield the numbers of micro-batches with which a plan could be the best."""
        for at in self.at:
            best = self.ranking.best()
            every = self.ask.objective == "memory"
            if best is None or every or self.floor_s(at) < best.score.step_s:
                yield at

    def floor_s(self, at: MicroBatchCase) -> float:
        """Return seconds that no plan with so many micro-batches goes below."""
        if at.micro_batches not in self._floors:
            found = bound_of_all(at.least, self.ask.cluster, at.micro_batches)
            self._floors[at.micro_batches] = found
        return self._floors[at.micro_batches]

    def _simple(self, at: MicroBatchCase) -> None:
        micro_batches = at.micro_batches
        try:
            placement = self.ask.place(SIMPLE, micro_batches)
        except (NoPlanError, InputError) as error:
            self.ranking.note(error)
            return
        best = self.ranking.best()
        if best is not None and self.ask.objective != "memory":
            near_s = best.score.step_s * (1 + self.ask.apart)
            if self._busiest_s(at, placement) > near_s:
                return
        asked = self.ask.schedule
        for schedule in (asked,) if asked else (self._chain, "list"):
            trial = Trial(SIMPLE, placement, schedule, micro_batches, self.ask.in_flight)
            if self.ranking.consider(trial) is not None:
                return

    def _busiest_s(self, at: MicroBatchCase, placement: Placement) -> float:
        """Return seconds that a step of these parts does not go below: the busiest device's."""
        seconds = dict.fromkeys(at.least.on, 0.0)
        for unit, names in enumerate(at.least.groups):
            device = placement.device_of[names[0]]
            on = at.least.on[device]
            seconds[device] += float(on.forward_s[unit] + on.backward_s[unit])
        return at.micro_batches * max(seconds.values())

    # ------------------------------------------------------------------ split backwards

    def split_backwards(self) -> None:
        """Simulate the best with backwards in two halves, which fill what is idle."""
        most = self.limits.halves
        for trial in halved(self.ranking.order(), self.ask.halves, most) if most else ():
            self.ranking.consider(trial)

    # ------------------------------------------------------------------ the bound

    def bound(self) -> Bound:
        """Return the lower bound, the least over the numbers of micro-batches."""
        counts = [str(at.micro_batches) for at in self.at]
        micro = ", ".join(counts[:-1]) + " or " * (len(counts) > 1) + counts[-1]
        kind = f"plan {self.ask.scope}, of whole backwards, with {micro} micro-batches"
        return Bound(kind, min(map(self.floor_s, self.at)))


# --------------------------------------------------------------------------- split backwards


NEAR = 1.35
"""Times the best step: what is idle is all that a split backward can fill."""


def halved(scored: Sequence[Scored], schedules: Mapping[str, bool], most: int) -> Iterator[Trial]:
    """Yield trials with split backwards, of the best for each number of micro-batches.

    Args:
        scored: what was simulated, the best first.
        schedules: of split backwards, by name; whether one is for lines only.
        most: lines for each number of micro-batches.
    """
    left: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    for each in scored:
        trial, score = each.trial, each.score
        micro, key = trial.micro_batches, (trial.micro_batches, score.devices, trial.recompute)
        is_far = len(score.devices) == 1 or score.step_s > NEAR * scored[0].score.step_s
        if is_far or key in seen or left.setdefault(micro, most) == 0:
            continue
        seen.add(key)
        left[micro] -= 1
        for schedule, of_lines in schedules.items():
            if score.is_chain or not of_lines:
                yield replace(trial, schedule=schedule, in_flight=None)


# --------------------------------------------------------------------------- the bound


def bound_of_all(work: Work, cluster: Cluster, micro_batches: int) -> float:
    """Return seconds that no plan of any kind goes below, for this number of micro-batches."""
    names = [device.name for device in cluster.devices]
    step_s = min(device.overheads.step_s for device in cluster.devices)
    if work.count == 0:
        return step_s
    seconds = np.stack([_unit_s(work, name, micro_batches) for name in names])
    return step_s + max(micro_batches * least_busy_s(seconds), _longest_path_s(work, names))


def _unit_s(work: Work, device: str, micro_batches: int) -> Array:
    on = work.on[device]
    found: Array = on.forward_s + on.backward_s + on.once_s / micro_batches
    return found


def _longest_path_s(work: Work, names: Sequence[str]) -> float:
    """Return the longest path through the units, there and back, each on its fastest device."""
    forward = np.stack([work.on[name].forward_s for name in names]).min(axis=0)
    both = np.stack([work.on[n].forward_s + work.on[n].backward_s for n in names]).min(axis=0)
    ends_forward, ends_both = np.zeros(work.count), np.zeros(work.count)
    makers: list[list[int]] = [[] for _ in range(work.count)]
    graded: list[list[int]] = [[] for _ in range(work.count)]
    for value in work.values:
        for reader in value.readers:
            makers[reader].append(value.maker)
        for reader in work.flows(value):
            graded[reader].append(value.maker)
    for unit in range(work.count):
        before = max((ends_forward[maker] for maker in makers[unit]), default=0.0)
        ends_forward[unit] = before + forward[unit]
        before = max((ends_both[maker] for maker in graded[unit]), default=0.0)
        ends_both[unit] = before + both[unit]
    return float(max(ends_forward.max(), ends_both.max()))


def _is_held_back(in_flight: tuple[int, ...] | None, micro_batches: int) -> bool:
    """Whether stages have fewer micro-batches in flight than 1F1B's own.

    Where a bound above the ledger has chosen so, the own numbers may fit, too.
    """
    limited = in_flight or ()
    own = (min(stages, micro_batches) for stages in range(len(limited), 0, -1))
    return any(map(operator.lt, limited, own))
