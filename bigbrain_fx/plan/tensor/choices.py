"""A plan with groups -> each axis that it divides, what that sends, and the step without it.

Axes of identical layers are one choice: `blocks.*:hidden`. Cuts, order and groups stay; only the
divided axes change.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from bigbrain_fx.core import Axis, Graph, Placement, TensorParallel
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import least_gap
from bigbrain_fx.plan.features import options_again
from bigbrain_fx.plan.nouns import Case, Plan
from bigbrain_fx.plan.shard import family, lengths, of_layers, sharded
from bigbrain_fx.plan.tensor.asked import named_axes, wanted_axes, with_sequence
from bigbrain_fx.plan.tensor.groups import seen_by
from bigbrain_fx.plan.tensor.make import GroupMaker
from bigbrain_fx.plan.tensor.messages import (
    exchange_s,
    exchanges_of,
    part_channels,
    passes,
    sent_bytes,
    sum_s,
    waiting_sums,
)


@dataclass(frozen=True)
class AxisChoice:
    """Axes of identical layers that a plan divides.

    Attributes:
        name: with `*` for the numbers of layers.
        kind: heads, hidden, vocabulary ...: `--tp-axes` takes all of a kind, too.
        axes: with their numbers.
        size: of each, in parts.
        parts: of it, by rank.
        sent_bytes: the most that a rank sends each other one in a step, less what it would send
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
    if best is None or not rest or whole_s > (1 - gap) * step_s or best.kind in rest:
        return ""  # the last: no option says it, since a kind's name divides all of that kind
    words = shlex.quote(",".join(rest))
    return f"by this forecast faster with {best.name} whole: --tp-axes {words}"


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
    """Return the bytes that a rank sends the next one for these axes, in all groups."""
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
    options = options_again(plan)
    maker = GroupMaker(plan.graph, plan.cluster, plan.source, options, tensor)
    placement, costs = _of_graph(maker.graph, plan.placement), maker.estimated(plan.rows)
    made = maker.placed(options, plan.micro_batches, placement, costs, is_trial=True)
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


# ------------------------------------------------------------------------------------------------
# A plan with groups -> the same, or one that divides the sequence between its sums, too.
#
# Nobody has to ask for it: it gives the same numbers to rounding as the plan without, and it is
# taken where its forecast is faster, or where only it fits.


def sequenced(plan: Plan, every: Sequence[Axis], make: Callable[[tuple[Axis, ...]], Plan]) -> Plan:
    """Return a plan, or one that divides the sequence, too, where its forecast is faster.

    By more than forecasts can tell apart: the plan without is the simpler one.

    Args:
        plan: with groups.
        every: axes of its graph that may be divided.
        make: plans the same groups with other axes.
    """
    tensor = plan.placement.tensor
    assert tensor is not None
    axes = with_sequence(plan.graph, every, tensor.axes, tensor.members)
    if len(axes) == len(tensor.axes):
        return plan
    enough_s = plan.forecast.step_s * (1 - least_gap(plan.cluster))
    try:
        if step_with(plan, axes) >= enough_s:
            return plan
        other = make(axes)
    except (InputError, NoPlanError):
        return plan
    return other if other.forecast.step_s < enough_s else plan


def grouped_plan(case: Case, make: Callable[[Case], Plan]) -> Plan:
    """Plan groups of a number; where no axes were named, with the sequence divided if that pays.

    Raises:
        NoPlanError: nothing fits in memory, the sequence divided or not.
        InputError: as `make` does.
    """
    graph, options = case.graph, case.options
    if options.tensor_axes or options.tensor_tried:
        return make(case)
    every = named_axes(graph, options)

    def again(axes: tuple[Axis, ...]) -> Plan:
        return make(case.asking(tensor_tried=axes))

    try:
        plan = make(case)
    except NoPlanError:
        chosen = wanted_axes(graph, options)
        axes = with_sequence(graph, every, chosen, options.tensor or 1)
        if len(axes) == len(chosen):
            raise
        return again(axes)
    return sequenced(plan, every, again) if plan.placement.tensor is not None else plan


# ------------------------------------------------------------------------------------------------
# What the groups of a plan divide and what that sends, in sentences. It decides nothing.


# A plan of `auto` may have groups that nobody asked for.
_ROUNDED = (
    "Sums that TP ranks share equal one process's to rounding, the same in every run. "
    "--tensor-parallel 1 "
    "leaves groups out."
)


_LINES = 4  # of the model, that are named


def tensor_text(plan: Plan) -> str:
    """Say which devices compute together, what they divide, and what a step sends; or nothing."""
    tensor = plan.placement.tensor
    if tensor is None:
        return ""
    used = set(plan.stages.devices)
    groups = ", ".join("+".join(group) for group in tensor.groups if used & set(group))
    shares = ":".join(map(str, tensor.shares))
    return (
        f"{groups} compute together, in shares {shares}: divided are "
        f"{'; '.join(_axes(tensor))}. {_whole(plan)}{_weights(plan)} {_sent_text(plan)} {_ROUNDED}"
    )


def group_warnings(plan: Plan) -> tuple[str, ...]:
    """Warn of groups of GPUs, which we never ran, and of groups over several hosts."""
    tensor, used = plan.placement.tensor, set(plan.stages.devices)
    if tensor is None:
        return ()
    groups = [group for group in tensor.groups if used & set(group)]
    kinds = {plan.cluster.device[name].kind for group in groups for name in group}
    return (*((_ON_GPUS,) if "cuda" in kinds else ()), *_over_hosts(plan, groups))


_ON_GPUS = (
    "tensor groups were run on CPUs, and over gloo by two processes of one GPU; no machine with "
    "several GPUs was there, and nccl was never tried. Compare some steps with --tensor-parallel 1"
)


def _over_hosts(plan: Plan, groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Say what exchanges over the network take of a step, and what they risk.

    Only replicas, stages and messages between them are meant for a network.
    """
    host = {device.name: device.host for device in plan.cluster.devices}
    wide = [group for group in groups if len({*map(host.get, group)}) > 1]
    return tuple(
        f"{'+'.join(group)} are one tensor group on the hosts "
        f"{', '.join(dict.fromkeys(host[name] for name in group))}: of a step's "
        f"{plan.forecast.step_s:.3g} s, up to {exchanges_s(plan, group[0]):.3g} s are exchanges "
        "between its ranks, over the network. A run compares what each of them computes for "
        "itself, and ends where their processors round otherwise"
        for group in wide
    )


def _axes(tensor: TensorParallel) -> Iterator[str]:
    """Yield a line for axes that are alike but for the numbers of their layers."""
    for (name, size), same in alike(tensor.axes).items():
        parts = "+".join(map(str, lengths(size, tensor.shares)))
        times = f" x{len(same)}" if len(same) > 1 else ""
        yield f"{name}{times} ({size} as {parts})"


def _whole(plan: Plan) -> str:
    """Say where what is divided is put together, since an op needs all of it, or has no rule."""
    tensor = plan.placement.tensor
    assert tensor is not None
    names = dict.fromkeys(n for axis in tensor.axes if axis.params for n in axis.whole)
    lines: dict[str, dict[str, None]] = {}
    for op in (plan.graph.op[name] for name in names):
        if op.outputs and op.target != "operator.getitem":
            known = family(op.target) or op.target.rpartition(".")[2]
            lines.setdefault(op.source or op.name, {})[known] = None
    if not lines:
        return ""
    said = [f"{', '.join(ops)} ({line})" for line, ops in lines.items()]
    more = f" and {len(said) - _LINES} more lines" if len(said) > _LINES else ""
    return (
        f"Computed whole, for want of a rule or over all of it: {'; '.join(said[:_LINES])}{more}. "
    )


def _weights(plan: Plan) -> str:
    """Say how much of the parameters is divided; the rest is whole on every member."""
    param = plan.graph.param
    own = {p.canonical: p.spec.nbytes for p in plan.graph.params if p.spec.requires_grad}
    cut = {param[shard.param].canonical for shard in plan.sharded.shards}
    share = sum(own[name] for name in cut & set(own)) / max(1, sum(own.values()))
    return f"Of the weights {100 * share:.1f} % are divided, every TP rank has the others."


def _sent_text(plan: Plan) -> str:
    sums = Counter[str]()
    for channel in part_channels(plan):
        sums[channel.sender] += channel.nbytes
    most, sender = max(((n, name) for name, n in sums.items()), default=(0, ""))
    if not most:
        return "Nothing is sent for it."
    return (
        f"In a step {sender} sends the others {most / 2**20:.2f} MiB, "
        f"{1e3 * exchanges_s(plan, sender):.1f} ms where none comes late."
    )


def exchanges_s(plan: Plan, device: str) -> float:
    """Return the seconds of a step that a device exchanges parts with a group that is on time."""
    tensor = plan.placement.tensor
    assert tensor is not None
    group = next(group for group in tensor.groups if device in group)
    own = plan.stages.micros_of(plan.stages.of(device)[0].index, plan.micro_batches)
    return len(own) * sum(_exchanges(plan, device, group))


def _exchanges(plan: Plan, device: str, group: Sequence[str]) -> Iterator[float]:
    tensor = plan.placement.tensor
    assert tensor is not None
    graph = plan.sharded.members[group.index(device)].at(plan.rows)
    seen = seen_by(plan.cluster, tensor.groups, group)
    for stage in plan.stages.of(device):
        for op in exchanges_of(graph, stage):
            for backward, count in passes(graph, op, again=stage.runs_again):
                yield count * exchange_s(op, seen, group, backward=backward)
        for spec in waiting_sums(graph, stage):
            yield sum_s(spec.nbytes, seen, group)
