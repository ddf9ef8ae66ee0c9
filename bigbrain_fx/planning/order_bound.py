"""Seconds that no order of a pipeline goes below, whatever a device takes next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bigbrain_fx.planning.virtual_stages import Kind, VirtualStages


def bound_s(stages: VirtualStages, *, in_row: bool) -> float:
    """Return seconds that no order of these stages goes below, split or not as they are.

    In a row: the busiest device's work, and the busiest link's. Alone besides: what comes before a
    device's first job, and after its last Backward.
    """
    return max(_bounds(stages, in_row))


def _links_s(stages: VirtualStages) -> Iterable[float]:
    """Return for how long a micro-batch takes each link."""
    timed = stages.timed
    found: dict[tuple[int, int], float] = {}
    for message in filter(timed.crosses, (*timed.values, *timed.gradients)):
        ends = timed.device_of[message.source], timed.device_of[message.target]
        found[ends] = found.get(ends, 0.0) + message.wire_s
    return found.values()


def _bounds(stages: VirtualStages, in_row: bool) -> Iterator[float]:
    timed, micros = stages.timed, stages.micro_batches
    yield micros * max(_links_s(stages), default=0.0)
    heads, tails = _heads(stages), _tails(stages)
    for device, own in stages.on.items():
        before_s, after_s = timed.begin_s[device], timed.once_s[device]
        by_kind = [
            micros * sum(taken_s(stages, kind, s) for s in own if kind in stages.kinds(s))
            for kind in Kind
        ]
        if in_row:
            yield before_s + sum(by_kind) + after_s
            continue
        head = max(before_s, min(heads[stage] for stage in own))
        yield head + sum(by_kind) + after_s
        ends = [tails[stage] for stage in own if stage not in stages.untrained]
        yield head + by_kind[Kind.FORWARD] + by_kind[Kind.BACKWARD] + min(ends, default=0.0)


def taken_s(stages: VirtualStages, kind: Kind, stage: int) -> float:
    """Return what a job takes of its device, messages' handling too."""
    timed = stages.timed
    messages = {Kind.FORWARD: timed.values, Kind.BACKWARD: timed.gradients}.get(kind, ())
    crossing = list(filter(timed.crosses, messages))
    return (
        stages.job_s[kind][stage]
        + sum(message.sent_s for message in crossing if message.source == stage)
        + sum(message.received_s for message in crossing if message.target == stage)
    )


def _heads(stages: VirtualStages) -> list[float]:
    """Return when each stage's first Forward can begin, its messages not yet handled."""
    found = [0.0] * stages.count
    for message in sorted(stages.timed.values, key=lambda message: message.source):
        source = message.source
        end_s = found[source] + stages.job_s[Kind.FORWARD][source] + message.way_s
        found[message.target] = max(found[message.target], end_s)
    return found


def _tails(stages: VirtualStages) -> list[float]:
    """Return what comes after each stage's last Backward at least: the way back, and a W."""
    found = [0.0] * stages.count
    for stage in range(stages.count):
        later = stages.backward_weight_s[stage]
        own = [0.0 if later is None else stages.job_s[Kind.BACKWARD_WEIGHT][stage]]
        own += [
            message.way_s + stages.job_s[Kind.BACKWARD][message.target] + found[message.target]
            for message in stages.timed.gradients
            if message.source == stage
        ]
        found[stage] = max(own)
    return found
