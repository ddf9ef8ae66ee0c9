"""What the groups of a plan divide and what that sends, in sentences. It decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bigbrain_fx.core import TensorParallel
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.shard import family, lengths
from bigbrain_fx.plan.tensor.choices import alike
from bigbrain_fx.plan.tensor.exchange import exchange_s, sum_s
from bigbrain_fx.plan.tensor.groups import seen_by
from bigbrain_fx.plan.tensor.messages import exchanges_of, part_channels, passes, waiting_sums

# A plan of `auto` may have groups that nobody asked for.
_ROUNDED = (
    "Sums that members share equal one process's to rounding, the same in every run. "
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
        f"{'; '.join(_axes(tensor))}. {_whole(plan)}{_weights(plan)} {_sent(plan)} {_ROUNDED}"
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
        "between its members, over the network. A run compares what each of them computes for "
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
    return f"Of the weights {100 * share:.1f} % are divided, the rest every member has."


def _sent(plan: Plan) -> str:
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
