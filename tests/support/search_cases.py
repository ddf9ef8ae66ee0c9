"""Small graphs with real work and clusters of unlike devices, drawn by a seed, for `auto`."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

from hypothesis import HealthCheck, settings, strategies as st

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.support.examples import examples
from tests.support.synthetic import GIB, chain_graph, cluster_of, device, random_graph

SOURCE = Source("model.py")
quick = settings(
    max_examples=examples(7),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10_000)


def case(seed: int, count: int, devices: int, memory_bytes: int = GIB) -> tuple[Graph, Cluster]:
    """Draw a graph with real work, and a cluster of unlike devices and links."""
    dice = random.Random(seed)
    graph = random_graph(seed, count) if seed % 2 else chain_graph(seed, count)
    ops = tuple(replace(op, flops=dice.choice((0, 10**6, 10**7, 3 * 10**7))) for op in graph.ops)
    every = [device(f"d{i}", dice.choice((1, 2, 3)), memory_bytes) for i in range(devices)]
    links = tuple(
        (a.name, b.name, Link(dice.choice((1e-5, 3e-4)), dice.choice((1e6, 1e7, 1e8))))
        for a, b in combinations(every, 2)
    )
    return replace(graph, ops=ops), Cluster(tuple(every), Link(1e-4, 1e7), links)


def auto(graph: Graph, cluster: Cluster, **choices: object) -> Plan:
    options = replace(Options("auto"), **choices)  # type: ignore[arg-type]  # fields by name
    return make_plan(graph, cluster, SOURCE, options)


def equal(count: int, link: Link, speed: float = 1.0, memory_bytes: int = GIB) -> Cluster:
    return cluster_of(*(device(f"d{i}", speed, memory_bytes) for i in range(count)), link=link)


def even_chain(count: int, flops: int = 10**7, rows: int = 32) -> Graph:
    """Return equal layers in a row, of `flops` for 4 rows."""
    graph = chain_graph(1, count, skips=False)
    width = replace(graph.ops[0].outputs[0], shape=("B", 64))
    ops = tuple(
        replace(op, flops=f"{flops // 4}*B", outputs=(width,), writes_bytes="256*B")
        for op in graph.ops
    )
    entry = replace(graph.inputs[0], spec=replace(graph.inputs[0].spec, shape=("B", 4)))
    return replace(graph, ops=ops, inputs=(entry,), batch=rows)
