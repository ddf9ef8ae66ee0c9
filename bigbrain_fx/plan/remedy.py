"""A plan, or an error that names the nearest change with which the planner itself found one.

The module tries changes by planning again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Cluster, DeviceStore, Graph, Offloaded, SumOrder
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.making import make_plan
from bigbrain_fx.plan.memory_check import least_memory, mib
from bigbrain_fx.plan.nouns import Case, Options, Plan, Source
from bigbrain_fx.plan.recompute import Wanted
from bigbrain_fx.plan.schedule import traits

_PLENTY = 1 << 60
_DISK_BYTES_PER_S = 5e8  # of a disk that is only supposed; whether a plan fits is not changed by it
_TOO_MANY_OPS = 2000  # planning again and again would take longer than a user waits for a refusal


def plan_or_remedy(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    """Make a plan; where nothing fits, look for an edit with which something does.

    Raises:
        NoPlanError: nothing fits in memory, with the arithmetic per device and the first remedy
            that makes a plan. Remedies are more micro-batches, another schedule or partitioner,
            recompute, a divided or an offloaded optimizer state, and a smaller batch. Then come an
            optimizer without state, one more device like the last, and more memory. Of a large
            graph only the strongest are tried.
        InputError: the batch cannot be split as asked.
    """
    try:
        return make_plan(graph, cluster, source, options)
    except NoPlanError as error:
        # of `auto` the fast one: it is asked several times
        found = nearest_change(Case(graph, cluster, source, replace(options, effort="fast")))
        if found is None:
            raise
        raise error.told(help=f"a plan was found with {found}") from None


def _is_planned(case: Case) -> bool:
    """Whether there is a plan."""
    return _planned(case) is not None


def _planned(case: Case) -> Plan | None:
    """Return a plan, if there is one."""
    try:
        return make_plan(case.graph, case.cluster, case.source, case.options)
    except (NoPlanError, InputError):
        return None


def nearest_change(case: Case) -> str | None:
    """Return the first change with which the planner finds a plan that fits, if any."""
    is_large = len(case.graph.ops) > _TOO_MANY_OPS
    for text, other in _strong_changes(case) if is_large else _changes(case):
        if _is_planned(other):
            return text
    return _memory(case)


def _changes(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield changes, the smallest first: what to say of each, and what to plan with."""
    graph, options = case.graph, case.options
    yield from _other_stores(case)
    asked = options.micro_batches
    if asked is not None and graph.static_batch is None:
        for count in range(asked + 1, graph.batch + 1):
            if graph.batch % count == 0:
                yield f"--micro-batches {count}", case.asking(micro_batches=count)
    if options.schedule == "gpipe" or traits(options.schedule).joins:
        yield "--schedule 1f1b", case.asking(schedule="1f1b")
    if options.partitioner != "chain-dp":
        other = case.asking(partitioner="chain-dp", partitioner_options=())
        yield "--partitioner chain-dp", other
    yield from _recomputing(case)
    if (options.replicas or 1) > 1 and options.zero_stage == 0:
        yield "--zero 1", case.asking(zero_stage=1)
    yield from _offloading(case)
    if (options.replicas or 1) > 1 and options.zero_stage < 3:
        order: SumOrder = "tree" if options.all_reduce_order == "tree" else "micro"
        divided = case.asking(zero_stage=3, sum_order=order)
        yield f"--zero 3 --all-reduce-order {order}", divided
    yield from _smaller_batches(case, "")
    yield from _offloading(case, supposed=True)
    yield from _without_optimizer_state(case)
    for text, recomputing in _recomputing(case):
        yield from _smaller_batches(recomputing, f"{text} and ")
    devices = case.cluster.devices
    last = devices[-1]
    more_devices = (*devices, replace(last, name=_new_name(case.cluster)))
    grown = replace(case.cluster, devices=more_devices)
    yield f"one more device like {last.name} in the cluster file", replace(case, cluster=grown)


def _strong_changes(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the changes that save most: for graphs of which each plan takes long."""
    yield from _other_stores(case)
    yield from _recomputing(case)
    yield from _offloading(case)
    for text, recomputing in _recomputing(case):
        yield from list(_smaller_batches(recomputing, f"{text} and "))[-1:]


def _other_stores(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield what there is to do where stores are too small."""
    if not case.options.offload:
        return
    yield "--offload left out", replace(case, options=replace(case.options, offload=()))
    roomy = tuple(replace(store, capacity_bytes=_PLENTY) for store in case.cluster.stores)
    larger = replace(case, cluster=replace(case.cluster, stores=roomy))
    yield 'more "capacity" for the stores in the cluster file', larger


def _recomputing(case: Case) -> Iterator[tuple[str, Case]]:
    asked = case.options.recompute
    open_still: tuple[Wanted, ...] = ("auto", "all") if asked in (None, (), "ops") else ("all",)
    for wanted in open_still if case.graph.training and asked not in ("auto", "all") else ():
        yield f"--activation-checkpointing {wanted}", case.asking(recompute=wanted)


def _offloading(case: Case, *, supposed: bool = False) -> Iterator[tuple[str, Case]]:
    """Yield what may lie in stores; where some lack, in supposed ones if asked for."""
    options = case.options
    has_stores = all(device.name in case.cluster.store for device in case.cluster.devices)
    if supposed == has_stores:
        return
    groups = options.wants_groups
    if not case.graph.training:
        return
    tried: tuple[tuple[Offloaded, ...], ...] = (
        ("state",),
        ("activations",),
        ("activations", "state"),
        ("activations", "state", "weights"),
    )
    for offload in tried[:-1] if groups else tried:
        if set(offload) > set(options.offload):
            members = options.tensor if groups else 1
            asked = case.asking(offload=offload, tensor=members)
            words = "weights" if "weights" in offload else ",".join(offload)
            yield _in_stores(asked, words, has_stores=has_stores)


def _in_stores(asked: Case, words: str, *, has_stores: bool) -> tuple[str, Case]:
    if has_stores:
        return f"--offload {words}", asked
    stores = (
        DeviceStore(f"disk-{device.name}", device.name, _PLENTY, _DISK_BYTES_PER_S, "disk")
        for device in asked.cluster.devices
    )
    given = replace(asked, cluster=replace(asked.cluster, stores=tuple(stores)))
    what = 'and a store for each device ("stores" in the cluster file)'
    return f"--offload {words}, {what}", given


def _smaller_batches(case: Case, before: str) -> Iterator[tuple[str, Case]]:
    """Yield batches of half the rows, a quarter, and so on; gradients then are of fewer rows."""
    rows, whole = case.graph.batch, case.graph.batch
    while case.graph.static_batch is None and rows % 2 == 0:
        rows //= 2
        where = (
            f"--batch {rows}"
            if case.source.path.startswith("hf:")
            else f"batches of {rows} rows instead of {whole} (example_batch() of the model file)"
        )
        yield before + where, replace(case, graph=replace(case.graph, batch=rows))


def _without_optimizer_state(case: Case) -> Iterator[tuple[str, Case]]:
    if case.graph.training and case.source.optimizer_state > 0:
        plain = replace(case.source, optimizer_state=0.0, optimizer_states={})
        text = "torch.optim.SGD without momentum (optimizer() of the model file): it keeps no state"
        yield text, replace(case, source=plain)


def _new_name(cluster: Cluster) -> str:
    names = {device.name for device in cluster.devices}
    return next(name for i in range(len(names) + 1) if (name := f"more{i}") not in names)


def _memory(case: Case) -> str | None:
    """Return the memory with which every device would hold its part of a plan."""
    plenty = _with_memory(case, _PLENTY)
    free = _planned(plenty)
    if free is None:
        return None
    rows = case.graph.at(free.rows)
    enough = least_memory(free.forecast, case.cluster, rows, free.micro_batches)
    given = case.asking(micro_batches=free.micro_batches)
    if not _is_planned(_with_memory(given, enough)):
        return None
    return f'{mib(enough)} of memory for every device ("memory" in the cluster file)'


def _with_memory(case: Case, memory_bytes: int) -> Case:
    devices = (replace(device, memory_bytes=memory_bytes) for device in case.cluster.devices)
    return replace(case, cluster=replace(case.cluster, devices=tuple(devices)))
