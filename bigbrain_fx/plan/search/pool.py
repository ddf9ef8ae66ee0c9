"""Lines x settings -> the splits that are worth simulating, with what to keep in flight.

It knows dynamic programming and the pace of chains; it simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from bigbrain_fx.core import Cluster, Link
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
_LEAST_SHARE, _MOST_SHARE, _PRECISION = 0.9, 1.4, 1.01
_PACED = 4
"""Splits whose pace is looked at, for each that is simulated."""


def splits(
    line: Line, setting: Setting, sequences: Iterable[Sequence[str]], steps: int
) -> tuple[list[Split], int]:
    """Return the splits that the search for the best one met, the best first.

    Half of the steps go to the best split of every sequence: it may be the fastest when it is
    simulated, though the objective prefers another.

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


def repaced(found: Found, cutter: Cutter) -> Found:
    """Return a polished split with the best choice of what to keep in flight."""
    if not found.line.work.trains:
        return found
    choices = _choices(found.line, cutter.setting, found.split, None)
    return min([found, *choices], key=lambda entry: entry.step_s)


# --------------------------------------------------------------------------- settings


def settings(
    cluster: Cluster, micro_batches: int, recompute: bool, tight: bool, for_memory: bool
) -> list[Setting]:
    """Return for what to cut: the cluster, and poorer ones.

    A split that was made for slower links or less memory may turn out better than the one made for
    the cluster itself, since the objective is not the simulator's time. So links at a half and an
    eighth are tried and, where memory is tight, memory at three quarters and a half, and fewer
    micro-batches in flight than 1F1B's.
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


def nearest(
    line: Line, setting: Setting, sequences: Sequence[Sequence[str]]
) -> Iterator[tuple[Split, float]]:
    """Yield, for each sequence, the split that fits with the least memory, and that as a share.

    What a piece holds is known from above only: what fits with a little more memory may fit.
    """
    for sequence in sequences:
        low, high, found = _LEAST_SHARE, _MOST_SHARE, None
        middle = high
        while True:
            cutter = Cutter(line, replace(setting, memory_scale=middle))
            split = cutter.solve(sequence, float("inf"))
            if split is None and found is None:
                break  # not even with the most
            low, high = (low, middle) if split is not None else (middle, high)
            found = found if split is None else split
            if high / low <= _PRECISION:
                break
            middle = (low * high) ** 0.5
        if found is not None:
            yield found, high


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
