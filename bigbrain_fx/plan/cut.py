"""Graph, Placement -> Stages: an acyclic list of stages for any placement, and its edges.

This module knows the graph and the placement; it knows nothing of schedules, time, or emitted text.

    placement   a a b a b b          scattered placements too: each device gets as few stages as the
    stages      [a a a] [b b b]      greedy finds, and a chain of k devices gives exactly k
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from bigbrain_fx.core import Edge, Graph, Placement, Stage, Stages, TensorSpec
from bigbrain_fx.planning import is_size, live_ops as live_ops, neighbours, stage_lists, units

SIZE = "aten.sym_size.int"
_UPDATING = "_updating"  # as a cached property is: stages are frozen
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def cut(
    graph: Graph,
    placement: Placement,
    rows: int,
    *,
    clip: bool = False,
    breaks: Sequence[str] = (),
) -> Stages:
    """Turn a placement into stages and edges.

    Args:
        graph: as captured.
        placement: a device for every op; of ops that must stay together, the one with most work
            decides.
        rows: of a micro-batch, so that edges know their bytes.
        clip: whether gradients are clipped by their global norm, so that devices exchange norms.
        breaks: ops at which their device begins another stage.

    Returns:
        Stages in an order in which they can run. Deterministic.

    The greedy is run from both ends and the shorter list kept.
    """
    live = live_ops(graph)
    concrete = graph.at(rows)
    found = units(concrete)
    groups = [group for group in (_only(group, live) for group in found.groups) if group]
    device_of = [_device_of(concrete, group, placement) for group in groups]
    order = _ordered(graph, groups, _parts_of(groups, device_of, breaks))
    stages = [
        _stage(graph, found.replicated, number, device_of[ids[0]], [groups[i] for i in ids])
        for number, ids in enumerate(order)
    ]
    stages = _with_sends(stages, gathered(graph, stages))
    moved = [
        name
        for group, device in zip(groups, device_of, strict=True)
        for name in group
        if placement.device_of[name] != device
    ]
    edges = (*_activations(concrete, stages), *_gradients(concrete, stages), *_tied(graph, stages))
    whole = Stages(tuple(stages), edges, tuple(moved))
    return replace(whole, edges=(*edges, *norms(graph, whole))) if clip else whole


def trained(graph: Graph, stages: Sequence[Stage]) -> frozenset[int]:
    """Return the stages with a backward pass: they make the loss, or a trained stage reads them."""
    found: set[int] = set()
    wanted: dict[int, set[str | None]] = {}  # of each replica, by what is found so far
    for stage in reversed(stages):
        own = set(stage.ops) - set(stage.recomputed)
        read = wanted.setdefault(stage.replica, {graph.loss})
        if any(value in graph.graded for value in read & own):
            found.add(stage.index)
            read |= _graded_reads(graph, stage)
    return frozenset(found)


def _graded_reads(graph: Graph, stage: Stage) -> set[str]:
    """Return what a stage receives and gives a gradient back for; what it detaches gets none."""
    own = [graph.op[name] for name in stage.ops if name in graph.graded]
    return {ref for op in own for ref in op.refs}.intersection(stage.receives)


def roots(graph: Graph, stage: Stage) -> tuple[str, ...]:
    """Return the values a stage returns: those it sends, then the loss or outputs that it makes."""
    own = set(stage.ops) - set(stage.recomputed)
    wanted = (graph.loss,) if graph.loss else graph.outputs
    return tuple(dict.fromkeys((*stage.sends, *(name for name in wanted if name in own))))


def gathered(graph: Graph, stages: Sequence[Stage]) -> frozenset[str]:
    """Return the outputs that go to the last stage's device for nothing but to be collected there.

    Without a loss, the last stage's device has all outputs in the end: what others make is sent.
    """
    if graph.loss is not None or graph.training or not stages:
        return frozenset()
    device, there = stages[-1].device, set()
    for stage in stages:
        if stage.device == device:
            there |= set(stage.ops) | set(stage.receives)
    return frozenset(name for name in graph.outputs if name in graph.op and name not in there)


# --------------------------------------------------------------------------- the order of stages


def _parts_of(
    groups: Sequence[tuple[str, ...]], device_of: Sequence[str], breaks: Sequence[str]
) -> list[str]:
    """Return each group's device; a device that breaks counts as one for each of its parts.

    A part begins with the group of the op that breaks, in the order in which groups can run.
    """
    if not breaks:
        return list(device_of)
    number = {name: i for i, group in enumerate(groups) for name in group}
    starts = [number[name] for name in breaks if name in number]
    found = []
    for place, device in enumerate(device_of):
        part = sum(start <= place and device_of[start] == device for start in starts)
        found.append(f"{device} part {part}" if part else device)
    return found


def _ordered(
    graph: Graph, groups: Sequence[tuple[str, ...]], device_of: Sequence[str]
) -> list[list[int]]:
    """Return the groups of each stage, in an order in which stages can run."""
    group_of = {name: i for i, group in enumerate(groups) for name in group}
    reads = ((group_of.get(ref, i), i) for n, i in group_of.items() for ref in graph.op[n].refs)
    edges = {(a, b) for a, b in reads if a != b}
    number = {device: i for i, device in enumerate(dict.fromkeys(device_of))}
    count, homes = len(groups), [number[device] for device in device_of]
    before = neighbours(count, ((b, a) for a, b in edges))
    return stage_lists(before, neighbours(count, edges), homes)


def _device_of(graph: Graph, group: tuple[str, ...], placement: Placement) -> str:
    weight: dict[str, int] = {}
    for name in group:
        op = graph.op[name]
        work = 1 + int(op.flops) + int(op.reads_bytes) + int(op.writes_bytes)
        weight[placement.device_of[name]] = weight.get(placement.device_of[name], 0) + work
    return max(weight, key=lambda device: weight[device])  # the first of equals: dicts keep order


def _only(group: tuple[str, ...], live: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in group if name in live)


# --------------------------------------------------------------------------- one stage


def _stage(
    graph: Graph,
    replicated: frozenset[str],
    number: int,
    device: str,
    groups: list[tuple[str, ...]],
) -> Stage:
    own = {name for group in groups for name in group}
    copies = _copies(graph, own, replicated)
    names = tuple(sorted(own | copies, key=graph.place.__getitem__))
    reads = dict.fromkeys(
        ref for name in names if not is_size(graph.op[name]) for ref in graph.op[name].refs
    )
    params = dict.fromkeys(param for name in names for param in graph.op[name].params)
    others = (ref for ref in reads if ref in graph.op and ref not in own and ref not in copies)
    receives = tuple(sorted(others, key=graph.place.__getitem__))
    inputs = tuple(entry.name for entry in graph.inputs if entry.name in reads)
    stage = Stage(
        number,
        device,
        names,
        tuple(n for n in names if n in copies),
        tuple(params),
        inputs,
        receives,
    )
    return _with_size_source(graph, stage)


def _copies(graph: Graph, own: set[str], replicated: frozenset[str]) -> set[str]:
    copies: set[str] = set()
    pending = [ref for name in own for ref in graph.op[name].refs]
    while pending:
        name = pending.pop()
        if name in replicated and name not in copies:
            copies.add(name)
            if graph.op[name].target != SIZE:  # reads whatever local tensor has that size
                pending += graph.op[name].refs
    return copies


def _with_size_source(graph: Graph, stage: Stage) -> Stage:
    """Give the stage a model input to read the batch size from, when nothing local has it."""
    sizes = [graph.op[name] for name in stage.ops if graph.op[name].target == SIZE]
    inputs = set(stage.inputs)
    for op in sizes:
        value = op.refs[0]
        if _is_local(graph, stage, value):
            continue
        wanted = _spec(graph, value).shape[int(str(op.args[1]))]
        if any(wanted in _spec(graph, name).shape for name in (*stage.receives, *sorted(inputs))):
            continue
        inputs.update(entry.name for entry in graph.inputs if wanted in entry.spec.shape)
    return replace(stage, inputs=tuple(e.name for e in graph.inputs if e.name in inputs))


def _is_local(graph: Graph, stage: Stage, value: str) -> bool:
    return value in stage.ops or value in stage.receives or value in stage.inputs


def _spec(graph: Graph, value: str) -> TensorSpec:
    return graph.input[value].spec if value in graph.input else graph.op[value].outputs[0]


def _with_sends(stages: list[Stage], gathered: frozenset[str]) -> list[Stage]:
    received = {name for stage in stages for name in stage.receives} | gathered

    def sends(stage: Stage) -> tuple[str, ...]:
        copies = set(stage.recomputed)
        return tuple(name for name in stage.ops if name in received and name not in copies)

    return [replace(stage, sends=sends(stage)) for stage in stages]


# --------------------------------------------------------------------------- edges


def _readers(graph: Graph, stages: list[Stage]) -> Iterator[tuple[str, Stage, list[Stage]]]:
    collected = gathered(graph, stages)
    reading: dict[str, list[Stage]] = {}
    for stage in stages:
        for value in stage.receives:
            reading.setdefault(value, []).append(stage)
    for maker in stages:
        for value in maker.sends:
            readers = reading.get(value, [])
            yield value, maker, [*readers, *(stages[-1:] if value in collected else ())]


def _activations(graph: Graph, stages: list[Stage]) -> Iterator[Edge]:
    """Yield who gets each value from whom: the maker, or an earlier reader on the same device."""
    for value, maker, readers in _readers(graph, stages):
        holder = {maker.device: maker.index}
        for reader in readers:
            source = holder.setdefault(reader.device, reader.index)
            source = maker.index if source == reader.index else source
            yield Edge(value, source, reader.index, "activation", graph.op[value].outputs[0].nbytes)


def _gradients(graph: Graph, stages: list[Stage]) -> Iterator[Edge]:
    """Yield the relay of each gradient: last reader first, through every reader, to the maker.

    That is the order in which the autograd engine adds them up in one process.
    """
    with_backward = trained(graph, stages)
    graded = {s.index: _graded_reads(graph, s) for s in stages if s.index in with_backward}
    for value, maker, readers in _readers(graph, stages):
        path = [r.index for r in readers if value in graded.get(r.index, ())]
        if value in graph.graded:
            for target, source in pairwise([maker.index, *path]):
                yield Edge(value, source, target, "gradient", graph.op[value].outputs[0].nbytes)


def holders(graph: Graph, stages: Sequence[Stage]) -> dict[str, list[Stage]]:
    """Return, for each trained parameter by canonical name, the stages that hold it, in order.

    These stages are all readers of the parameter, if one of them gives it a gradient: all copies
    must stay equal.
    """
    reading: dict[str, list[Stage]] = {}
    for stage in stages:
        for name in dict.fromkeys(graph.param[param].canonical for param in stage.params):
            reading.setdefault(name, []).append(stage)
    graded = {name for stage in stages for name in graded_params(graph, stage)}
    order = {param.canonical: i for i, param in reversed(list(enumerate(graph.params)))}
    return {name: reading[name] for name in sorted(graded, key=lambda name: order[name])}


def graded_params(graph: Graph, stage: Stage) -> set[str]:
    """Return the parameters, by canonical name, that get a gradient from a stage."""
    ops = (graph.op[name] for name in stage.ops if name in graph.graded)
    found = {graph.param[name] for op in ops for name in op.params}
    return {param.canonical for param in found if param.spec.requires_grad}


def _tied(graph: Graph, stages: list[Stage]) -> Iterator[Edge]:
    """Yield each leaf's gradient to all other devices that hold the parameter, last stage first."""
    if graph.loss is None:
        return
    graded = {stage.index: graded_params(graph, stage) for stage in stages}
    for name, held_by in holders(graph, stages).items():
        first_on: dict[str, int] = {}
        for stage in held_by:
            first_on.setdefault(stage.device, stage.index)
        for source in (s for s in reversed(held_by) if name in graded[s.index]):
            for device, target in first_on.items():
                if device != source.device:
                    yield Edge(name, source.index, target, "tied", graph.param[name].spec.nbytes)


def norms(graph: Graph, stages: Stages) -> Iterator[Edge]:
    """Yield the norms of each device's parameters to every other device, once a step."""
    owned = owners(graph, stages)
    first_on = {stage.device: stage.index for stage in reversed(stages.stages)}
    for a, own in owned.items():
        for b in first_on:
            if a != b and own:
                nbytes = norms_spec(graph, own).nbytes
                yield Edge("norms", first_on[a], first_on[b], "norm", nbytes)


def norms_spec(graph: Graph, names: Sequence[str]) -> TensorSpec:
    """Return what the norms of some parameters' gradients are, stacked: torch's type of them all.

    A norm has its gradient's type (of a complex one, that of its parts).
    """
    kinds = {_REAL.get(kind, kind) for kind in (graph.param[name].spec.dtype for name in names)}
    dtype = kinds.pop() if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"
    return TensorSpec((len(names),), dtype, (1,))


def owners(graph: Graph, stages: Stages) -> dict[str, list[str]]:
    """Return the parameters each device answers for: those of which it is the first holder.

    Of replicas it is the first one's device; with ZeRO, that of the replica that updates it. By
    canonical name, in the order of the model.
    """
    updates = updating(graph, stages) if stages.zero_stage else {}
    held = [holders(graph, stages.of_replica(replica)) for replica in range(stages.replicas)]
    owned: dict[str, list[str]] = {device: [] for device in stages.devices}
    for name in held[0]:
        owned[held[updates.get(name, 0)][name][0].device].append(name)
    return owned


def updating(graph: Graph, stages: Stages) -> dict[str, int]:
    """Return the replica whose piece of its bucket each parameter is in, where pieces are whole.

    Of several shard groups it is one of the first; the same place in others has that piece, too.
    """
    known = stages.__dict__.get(_UPDATING)  # every device asks
    if known is None or known[0] is not graph:
        known = stages.__dict__[_UPDATING] = graph, _updating(graph, stages)
    found: dict[str, int] = known[1]
    return found


def _updating(graph: Graph, stages: Stages) -> dict[str, int]:
    found: dict[str, int] = {}
    firsts = (b for b in stages.buckets if not stages.stages[b.stages[0]].member)
    for bucket in firsts:  # other ranks have the same parameters in the same pieces
        ends = list(accumulate(bucket.pieces))
        start = 0
        for name in bucket.params:
            found[name] = min(bisect_right(ends, start), len(ends) - 1)
            start += graph.param[name].spec.numel
    return found


# --------------------------------------------------------------------------- each replica


_Names = tuple[str, ...]


def cut_each(graph: Graph, placement: Placement, rows: int) -> list[Stages]:
    """Cut a graph for each replica of a placement; a thousand identical ones cost one cut."""
    known: dict[object, tuple[_Names, Stages]] = {}
    found = []
    for each in placement.replicas:
        names, pattern = _pattern(graph, each.device_of)
        key = pattern, each.breaks
        if key not in known:
            known[key] = names, cut(graph, Placement(each.device_of), rows, breaks=each.breaks)
        first, stages = known[key]
        found.append(on_devices(stages, dict(zip(first, names, strict=True))))
    return found


def _pattern(graph: Graph, device_of: Mapping[str, str]) -> tuple[_Names, tuple[int, ...]]:
    """Return devices in the order in which ops meet them, and for each op which of them it has."""
    number: dict[str, int] = {}
    pattern = tuple(number.setdefault(device_of[op.name], len(number)) for op in graph.ops)
    return tuple(number), pattern


def on_devices(stages: Stages, to: Mapping[str, str]) -> Stages:
    """Return the same stages on other devices."""
    return replace(
        stages,
        stages=tuple(replace(stage, device=to[stage.device]) for stage in stages.stages),
    )
