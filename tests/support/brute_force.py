"""Every contiguous split of a small chain, and its objective worked out from the graph alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import numpy as np

from bigbrain_fx.core import Cluster, Costs, Graph, Link
from bigbrain_fx.planning.unit_work import Work
from tests.support.reserved import reserved
from tests.support.synthetic import device


def every_split(graph: Graph, cluster: Cluster) -> Iterator[tuple[Sequence[str], list[int]]]:
    names = [d.name for d in cluster.devices]
    count = len(graph.ops)
    for used in range(1, min(len(names), count) + 1):
        for sequence in permutations(names, used):
            for inner in combinations(range(1, count), used - 1):
                yield sequence, [0, *inner, count]


def plain_step_s(
    graph: Graph, costs: Costs, sequence: Sequence[str], cuts: Sequence[int], micro: int
) -> float:
    """Compute the objective from the graph alone, as the class's docstring states it."""
    place = {entry.name: i for i, entry in enumerate(graph.ops)}
    first_reader: dict[str, int] = {}
    last_reader: dict[str, int] = {}
    for i, entry in enumerate(graph.ops):
        for name in entry.params:
            first_reader.setdefault(graph.param[name].canonical, i)
            last_reader[graph.param[name].canonical] = i
    size = {param.canonical: param.spec.nbytes for param in graph.params}
    busy: list[float] = []
    total = 0.0
    for stage, name in enumerate(sequence):
        own = range(cuts[stage], cuts[stage + 1])
        each = [costs.op_cost(graph.ops[i].name, name) for i in own]
        owned = [size[param] for param, i in first_reader.items() if i in own]
        once_s = sum(owned) * costs.optimizer_s_per_byte[name]
        once_s += len(owned) * costs.optimizer_s_per_tensor.get(name, 0.0)
        busy.append(sum(c.forward_s + c.backward_s for c in each) + once_s / micro)
        total += busy[-1]
    for stage in range(1, len(sequence)):
        at = cuts[stage]
        crossing = [
            entry.outputs[0].nbytes
            for entry in graph.ops[:at]
            if any(place[reader] >= at for reader in graph.consumers[entry.name])
        ]
        tied = [size[p] for p in first_reader if first_reader[p] < at <= last_reader[p]]
        link = costs.cluster.link(sequence[stage - 1], sequence[stage])
        one_way_s = sum(crossing) / link.bytes_per_s
        tied_s = sum(tied) / link.bytes_per_s / micro
        total += 2 * (one_way_s + link.latency_s + tied_s)
        busy.append(one_way_s + tied_s)
    return total + (micro - 1) * max(busy)


def plain_fits(
    known: Work, cluster: Cluster, sequence: Sequence[str], cuts: Sequence[int], micro: int
) -> bool:
    sizes = np.diff(cuts)
    homes = [d for d, size in zip(sequence, sizes, strict=True) for _ in range(size)]
    needs = reserved(known, cluster, micro, homes)
    return all(n <= cluster.device[name].memory_bytes for name, n in needs.items())


def unlike_cluster(seed: int, count: int, memory_bytes: Sequence[int]) -> Cluster:
    devices = [
        device(f"d{i}", speed=1 + i, memory_bytes=memory_bytes[i % len(memory_bytes)])
        for i in range(count)
    ]
    links = tuple(
        (a.name, b.name, Link(1e-5 * (1 + seed % 3), 1e5 * (1 + (seed + i) % 4)))
        for i, (a, b) in enumerate(combinations(devices, 2))
    )
    return Cluster(tuple(devices), Link(1e-4, 1e6), links)
