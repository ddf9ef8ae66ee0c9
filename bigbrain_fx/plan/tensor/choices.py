"""A plan with groups -> each axis that it divides, what that sends, and the step without it.

Axes of alike layers are one choice: `blocks.*:hidden`. Cuts, order and groups stay; only what is
divided changes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from bigbrain_fx.core import Axis, Graph, Placement, TensorParallel
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.deferring import defer_of
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.plan.recompute import wanted_by
from bigbrain_fx.plan.shard import lengths, of_layers, sharded
from bigbrain_fx.plan.tensor.make import GroupMaker
from bigbrain_fx.plan.tensor.messages import sent_bytes


@dataclass(frozen=True)
class AxisChoice:
    """Axes of alike layers that a plan divides.

    Attributes:
        name: with `*` for the numbers of layers.
        kind: heads, hidden, vocabulary ...: `--tp-axes` takes all of a kind, too.
        axes: with their numbers.
        size: of each, in parts.
        parts: of it, by member.
        sent_bytes: the most that a member sends each other one in a step, less what it would send
            without these axes; of all groups together. Below zero where they save exchanges.
        whole_s: forecast step with them whole; None where that does not fit.
        reason: why not.
        code: of the error that says so.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    size: int
    parts: tuple[int, ...]
    sent_bytes: int
    whole_s: float | None
    reason: str = ""
    code: str | None = None


def alike(axes: Iterable[Axis]) -> dict[tuple[str, int], list[Axis]]:
    """Gather axes that differ in the numbers of their layers only."""
    found: dict[tuple[str, int], list[Axis]] = {}
    for axis in axes:
        found.setdefault((of_layers(axis), axis.size), []).append(axis)
    return found


def axis_choices(plan: Plan) -> tuple[AxisChoice, ...]:
    """Return what a plan with groups divides, and what else it could; nothing without groups."""
    tensor = plan.placement.tensor
    return tuple(_choices(plan, tensor)) if tensor is not None else ()


def cheaper_whole(choices: Sequence[AxisChoice], step_s: float, gap: float) -> str:
    """Say which axes had better stay whole, and how to ask for that; nothing where none had.

    Args:
        choices: of a plan.
        step_s: its forecast.
        gap: the share by which another must be faster.
    """
    names = [choice.name for choice in choices]
    times = [(c.whole_s, c) for c in choices if c.whole_s is not None and names.count(c.name) == 1]
    whole_s, best = min(times, key=itemgetter(0), default=(step_s, None))
    rest = [choice.name for choice in choices if choice is not best]
    if best is None or not rest or whole_s > (1 - gap) * step_s:
        return ""
    words = shlex.quote(",".join(rest))
    option = f"--tp-axes {words}; or " if best.kind not in rest else ""
    return (
        f"by this forecast faster with {best.name} whole: {option}--tensor-parallel auto, which "
        "divides "
        "what pays"
    )


def _choices(plan: Plan, tensor: TensorParallel) -> Iterator[AxisChoice]:
    all_sent = _sent(plan, tensor, tensor.axes)
    for (name, size), axes in alike(tensor.axes).items():
        rest = tuple(axis for axis in tensor.axes if axis not in axes)
        parts = lengths(size, tensor.shares)
        sent = all_sent - _sent(plan, tensor, rest)
        about = name, axes[0].kind, tuple(axis.name for axis in axes), size, parts, sent
        try:
            yield AxisChoice(*about, step_with(plan, rest))
        except (NoPlanError, InputError) as error:
            yield AxisChoice(*about, None, error.what, code=error.code)


def _sent(plan: Plan, tensor: TensorParallel, axes: Sequence[Axis]) -> int:
    """Return the bytes that a member sends the next one for these axes, in all groups."""
    about = plan.graph, axes, tensor.shares
    members = sharded(*about, scatters=tensor.scatters).members
    return sent_bytes([graph.at(plan.rows) for graph in members], _runs(plan))


def _runs(plan: Plan) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield how many micro-batches each replica has, and which ops it runs twice."""
    for replica in range(plan.stages.replicas):
        own = [s for s in plan.stages.of_replica(replica) if not s.member]
        again = frozenset(name for s in own if s.runs_again for name in s.ops)
        yield len(plan.stages.micros_of(own[0].index, plan.micro_batches)), again


def step_with(plan: Plan, axes: tuple[Axis, ...], shares: tuple[int, ...] | None = None) -> float:
    """Return the forecast step of a plan if it divided these axes; cuts and groups stay.

    Shares stay, too, where none are given.

    Raises:
        NoPlanError: it does not fit in memory.
        InputError: a group divides nothing.
    """
    assert plan.placement.tensor is not None
    tensor = plan.placement.tensor
    tensor = replace(tensor, axes=axes, shares=shares or tensor.shares)
    own = replace(plan.stages, stages=plan.stages.of_member(0))
    trained = [number for number in plan.trained if number < len(own.stages)]
    options = Options(
        plan.partitioner,
        plan.estimator,
        plan.schedule,
        plan.micro_batches,
        plan.seed,
        recompute=wanted_by(own, trained),
        defer=defer_of(own, trained),
    )
    maker = GroupMaker(plan.graph, plan.cluster, plan.source, options, tensor)
    placement = _of_graph(maker.graph, plan.placement)
    given = replace(options, in_flight=plan.in_flight)
    about = given, plan.micro_batches, placement, maker.estimated(plan.rows)
    made = maker.placed(*about, is_trial=True)
    return made.forecast.step_s


def _of_graph(graph: Graph, placement: Placement) -> Placement:
    """Return the placement of a graph that divides other axes."""
    replicas = (
        replace(each, device_of=_homes(graph, each.device_of)) for each in placement.replicas
    )
    homes = _homes(graph, placement.device_of)
    return replace(placement, device_of=homes, replicas=tuple(replicas))


def _homes(graph: Graph, known: Mapping[str, str]) -> dict[str, str]:
    """Place the ops as before; an exchange that is new goes where its value is made."""
    any_home = next(iter(known.values()))
    homes: dict[str, str] = {}
    for op in graph.ops:
        made = (homes[ref] for ref in op.refs if ref in homes)
        homes[op.name] = known.get(op.name) or next(made, any_home)
    return homes
