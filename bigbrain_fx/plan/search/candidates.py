"""Chains x settings -> the splits that are worth simulating, with their micro-batches in flight.

The module knows dynamic programming and the pace of chains; it simulates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, Graph, Link, Placement
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.search.nouns import MEMORY_SLACK, MOST_OTHERS, Ask, Candidate, Score, Trial
from bigbrain_fx.planning import (
    BestFirst,
    Cutter,
    Found,
    Line,
    Setting,
    Split,
    chain_of,
    falling,
    in_flights,
    room_of,
    shifted_cuts,
    step_s,
)

GAP = 1e-3
_TAPERED = 8
"""Sequences of devices for which a split that ends together is made, too."""
_PACED = 4
"""Splits whose pace is looked at, for each that is simulated."""


def splits(
    line: Line, setting: Setting, sequences: Iterable[Sequence[str]], steps: int
) -> tuple[list[Split], int]:
    """Return the splits that the search for the best one met, the best first.

    Half of the steps go to the best split of every sequence. It may be the fastest when simulated,
    though the objective prefers another.

    Args:
        line: the units in one order.
        setting: cluster and micro-batches.
        sequences: the devices along the pipeline.
        steps: how many stages may be solved; reaching it is no error.

    Returns:
        The splits, and how many were compared.
    """
    cutter, micro = Cutter(line, setting), setting.micro_batches
    search = BestFirst(cutter)
    search.run(sequences, GAP, steps, max(steps // 2, 1))
    ranked = sorted(search.met.values(), key=lambda s: (s.step_s(micro), s.sequence, s.cuts))
    return [*_tapered(cutter, ranked), *ranked], search.compared


def _tapered(cutter: Cutter, ranked: Sequence[Split]) -> Iterator[Split]:
    """Yield, for the best sequences, a split whose later stages have less to do; an even one."""
    for sequence in list(dict.fromkeys(split.sequence for split in ranked))[:_TAPERED]:
        split = cutter.tapered(sequence)
        if split is not None:
            yield split
        even = cutter.even(sequence)
        if even is not None:
            yield even


def paced(
    line: Line, setting: Setting, ranked: Sequence[Split], most: int, wanted: tuple[int, ...] | None
) -> Iterator[Found]:
    """Yield the most promising splits, each with the two best choices of what to keep in flight.

    Args:
        line: that they are of.
        setting: for which they were made; the pace is that of its cluster.
        ranked: the best first.
        most: how many splits to yield.
        wanted: what to keep in flight, where that was asked for.
    """
    found = [list(_choices(line, setting, split, wanted)) for split in ranked[: _PACED * most]]
    for choices in sorted(found, key=lambda each: each[0].step_s)[:most]:
        yield from choices


def _choices(
    line: Line, setting: Setting, split: Split, wanted: tuple[int, ...] | None
) -> list[Found]:
    micro, trains = setting.micro_batches, line.work.trains
    again = _again(line, setting, split) if setting.recompute else ()
    chain = chain_of(line, split, setting, again)
    if not trains:
        in_flight = (micro,) * len(split.sequence)
        return [Found(line, split, micro, in_flight, (), step_s(chain, micro, in_flight, False))]
    room = room_of(line, setting, split, again)
    options = in_flights(chain, micro, room)
    if wanted is not None and len(wanted) == len(split.sequence):
        options = iter([falling(wanted, micro, wanted)])
    found = [Found(line, split, micro, n, again, step_s(chain, micro, n)) for n in options]
    found.sort(key=lambda entry: (round(entry.step_s, 12), sum(entry.in_flight)))
    return found[:2]


def _again(line: Line, setting: Setting, split: Split) -> tuple[int, ...]:
    """Return the stages that must recompute: those that could not keep what 1F1B has in flight."""
    room = room_of(line, setting, split, ())
    count = len(room)
    return tuple(s for s in range(count) if room[s] < min(setting.micro_batches, count - s))


# --------------------------------------------------------------------------- settings


def settings(
    cluster: Cluster, micro_batches: int, recompute: bool, tight: bool, for_memory: bool
) -> list[Setting]:
    """Return the clusters to cut for: the given one, and poorer ones.

    A split for slower links or less memory may be better than that for the cluster itself: the
    objective is not the simulator's time. Links at a half and an eighth are therefore tried.
    Where memory is tight, so are memory at three quarters and a half, and fewer micro-batches in
    flight than 1F1B's.
    """
    own = Setting(cluster, micro_batches)
    found = [own]
    if len(cluster.devices) > 1:
        found += [replace(own, cluster=_poorer(cluster, links=share)) for share in (1 / 2, 1 / 8)]
    if tight:
        found += [replace(own, at_most=most) for most in (1, 2)]
    if tight and recompute:
        found.append(replace(own, recompute=True))
    shares = (0.75, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08) if for_memory else (0.75, 0.5)
    if tight or for_memory:
        found += [replace(own, cluster=_poorer(cluster, memory=share)) for share in shares]
    return found


def _poorer(cluster: Cluster, links: float = 1.0, memory: float = 1.0) -> Cluster:
    def slower(link: Link) -> Link:
        return Link(link.latency_s / links, link.bytes_per_s * links)

    devices = (replace(d, memory_bytes=int(d.memory_bytes * memory)) for d in cluster.devices)
    return replace(
        cluster,
        devices=tuple(devices),
        default_link=slower(cluster.default_link),
        links=tuple((a, b, slower(link)) for a, b, link in cluster.links),
    )


def shifted(split: Split) -> Iterator[Split]:
    """Yield the splits with one cut a place further, or less far."""
    for cuts in shifted_cuts(split.cuts, 1):
        yield replace(split, cuts=cuts)


def is_tight(line: Line, setting: Setting) -> bool:
    """Whether some device could not hold the whole model with every micro-batch in flight."""
    return any(
        not line.memory.reach(device, setting.micro_batches, setting).has(0, line.count)
        for device in sorted(line.work.on)
    )


def by_pace(entry: Found) -> tuple[object, ...]:
    """Order splits by the step that their pace gives; of equals the simplest."""
    return (
        float(f"{entry.step_s:.9e}"),
        len(entry.split.sequence),
        sum(entry.in_flight),
        entry.micro_batches,
        entry.split.sequence,
        entry.split.cuts,
    )


# ------------------------------------------------------------------------------------------------
# What was simulated, and which of it is best for an objective. The judge simulates.


_Key = tuple[object, ...]


@dataclass(frozen=True)
class Scored:
    """A trial and what it takes."""

    trial: Trial
    score: Score


class CutBlocks:
    """The numbered layers of a graph: ("m.layers.3.up", "m.layers.3.down") is one."""

    def __init__(self, graph: Graph) -> None:
        self._ops: dict[str, list[str]] = {}
        for op in graph.ops:
            if op.layer:
                self._ops.setdefault(op.layer, []).append(op.name)

    def cut(self, placement: Placement) -> int:
        """Return how many are on more than one device."""
        home = placement.device_of
        return sum(len({home[name] for name in names}) > 1 for names in self._ops.values())


class Ranking:
    """The trials of one search: mutable, used once. A trial is simulated once.

    Attributes:
        simulated: how many were.
        first_error: of the first that was refused, one for lack of memory before any other.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.scored: list[Scored] = []
        self.refused: list[Candidate] = []
        self.simulated = 0
        self.first_error: BigBrainError | None = None
        self._seen: dict[_Key, Score | None] = {}
        self._ops = [op.name for op in ask.graph.ops]
        self._blocks = CutBlocks(ask.graph)

    def consider(self, trial: Trial) -> Score | None:
        """Simulate a trial, unless it is known; None when it cannot be run."""
        homes = trial.placement.device_of
        key = (
            tuple(map(homes.__getitem__, self._ops)),
            trial.schedule,
            trial.micro_batches,
            trial.in_flight,
            trial.recompute,
        )
        if key not in self._seen:
            self._seen[key] = self._judged(trial)
        return self._seen[key]

    def _judged(self, trial: Trial) -> Score | None:
        self.simulated += 1
        try:
            score = self.ask.judge(trial)
        except (NoPlanError, InputError) as error:
            self.refuse(trial, error)
            return None
        self.scored.append(Scored(trial, score))
        return score

    def refuse(self, trial: Trial, error: BigBrainError) -> None:
        """Note that a trial, or a partitioner that made none, is no plan."""
        self.note(error)
        candidate = _candidate(trial, None, error.what)
        if candidate not in self.refused and len(self.refused) < MOST_OTHERS:
            self.refused.append(candidate)

    def note(self, error: BigBrainError) -> None:
        """Keep an error to raise where there is no plan."""
        if self.first_error is None or (
            isinstance(error, NoPlanError) and not isinstance(self.first_error, NoPlanError)
        ):
            self.first_error = error

    def order(self) -> list[Scored]:
        """Return what was simulated, the best for the objective first."""
        if not self.scored:
            return []
        if self.ask.objective != "memory":
            return sorted(self.scored, key=self._by_time)
        most_s = MEMORY_SLACK * min(each.score.step_s for each in self.scored)
        within = [each for each in self.scored if each.score.step_s <= most_s * (1 + 1e-12)]
        others = [each for each in self.scored if each.score.step_s > most_s * (1 + 1e-12)]
        return [*sorted(within, key=self._by_memory), *sorted(others, key=self._by_time)]

    def best(self) -> Scored | None:
        """Return the first of `order`."""
        return next(iter(self.order()), None)

    def chosen(self) -> Scored | None:
        """Return what to run: of those that forecasts cannot tell from the best, the simplest."""
        ordered = self.order()
        if not ordered or self.ask.objective == "memory":
            return next(iter(ordered), None)
        most_s = self._counted_s(ordered[0]) * (1 + self.ask.apart)
        near = (each for each in ordered if self._counted_s(each) <= most_s)
        return min(near, key=self._simplicity)

    def _counted_s(self, each: Scored) -> float:
        """Return what a step counts: of split backwards somewhat more than its forecast."""
        return each.score.step_s * (self.ask.split if each.trial.schedule in self.ask.halves else 1)

    def _by_time(self, each: Scored) -> _Key:
        """Order by time; what differs by rounding is as fast, and takes what needs less."""
        score, trial = each.score, each.trial
        return (
            float(f"{self._counted_s(each):.9e}"),
            round(score.memory_share, 6),
            len(score.devices),
            not score.is_chain,
            trial.micro_batches,
        )

    def _by_memory(self, each: Scored) -> _Key:
        return (round(each.score.memory_share, 9), *self._by_time(each))

    def _simplicity(self, each: Scored) -> _Key:
        """Order by what a reader of the bundle has to follow; the first in time of those alike."""
        score, trial = each.score, each.trial
        halves = trial.schedule in self.ask.halves
        more = halves, bool(trial.recompute), trial.schedule == "list"
        counts = len(score.devices) > 1 and self.ask.cut_at != "anywhere"
        cut = counts and self._blocks.cut(trial.placement)
        return (len(score.devices), not score.is_chain, *more, cut)

    def table(self) -> tuple[Candidate, tuple[Candidate, ...]]:
        """Return the winner and the best of the rest, one of each kind, with why each loses."""
        winner = self.chosen()
        assert winner is not None
        rest = [each for each in self.order() if each is not winner]
        kinds: dict[_Key, Scored] = {}
        for each in rest:
            if _kind(each) != _kind(winner):
                kinds.setdefault(_kind(each), each)
        others = list(kinds.values())[:MOST_OTHERS]
        if self.ask.objective != "memory":
            others.sort(key=lambda each: each.score.step_s)  # what counts may be another figure
        why = self._why(winner)
        return (
            _candidate(winner.trial, winner.score, ""),
            tuple(_candidate(each.trial, each.score, why(each)) for each in others),
        )

    def _why(self, winner: Scored) -> Callable[[Scored], str]:
        best_s = min(each.score.step_s for each in self.scored)

        def why(other: Scored) -> str:
            slower = other.score.step_s / winner.score.step_s - 1 if winner.score.step_s else 0.0
            if self.ask.objective != "memory":
                if slower > 5e-5:
                    return f"{slower:+.1%} time"
                if slower < -5e-5:
                    return f"{slower:+.1%} time: too near to say; the best is simpler"
                more = other.score.memory_share - winner.score.memory_share
                return "as fast, with more memory in use" if more > 1e-6 else "as fast"
            if other.score.step_s > MEMORY_SLACK * best_s * (1 + 1e-12):
                return f"{other.score.step_s / best_s - 1:+.1%} time, more than is allowed"
            return f"{other.score.memory_share:.0%} of a device's memory"

        return why


def _kind(each: Scored) -> _Key:
    """Name what a reader of the table would tell apart."""
    trial = each.trial
    return (
        trial.partitioner,
        each.score.devices,
        trial.schedule,
        trial.micro_batches,
        bool(trial.recompute),
    )


def _candidate(trial: Trial, score: Score | None, why: str) -> Candidate:
    return Candidate(
        trial.partitioner,
        score.devices if score else tuple(dict.fromkeys(trial.placement.device_of.values())),
        trial.schedule,
        trial.micro_batches,
        trial.in_flight,
        trial.recompute,
        score.step_s if score else None,
        score.peak_bytes if score else (),
        score.memory_share if score else 0.0,
        why,
    )
