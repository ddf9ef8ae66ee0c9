"""Random cases for methods that compare whole placements: graphs, clusters, homes."""

from __future__ import annotations

import random
from dataclasses import replace

from bigbrain_fx.core import Cluster, Costs, Graph, Link, OpCost, Overheads, Placement
from bigbrain_fx.plan.cut import cut, trained
from bigbrain_fx.plan.schedule import build, stage_costs
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.planning.unit_work import Work
from tests.support.synthetic import GIB, cluster_of, device, random_costs, random_graph


def unlike(seed: int, count: int, memory_bytes: int = GIB, handling: bool = False) -> Cluster:
    """Draw devices of three speeds, a link of its own for every pair, and what messages cost."""
    dice = random.Random(seed)
    devices = [device(f"d{i}", 1 + i % 3, memory_bytes) for i in range(count)]
    if handling:
        own = Overheads(message_s=1e-4, message_bytes_per_s=1e7, instruction_s=1e-4, step_s=1e-3)
        devices = [replace(each, overheads=own) for each in devices]
    links = tuple(
        (a.name, b.name, Link(dice.choice((1e-5, 1e-3)), dice.choice((1e5, 1e6, 1e8))))
        for i, a in enumerate(devices)
        for b in devices[:i]
    )
    return replace(cluster_of(*devices, link=Link(1e-4, 1e6)), links=links)


def case(seed: int, count: int, cluster: Cluster) -> tuple[Graph, Costs]:
    """Draw a graph and its costs; its mask, which any stage may copy, takes no time."""
    graph = random_graph(seed, count)
    costs = random_costs(seed, graph, cluster)
    ops = {name: {**of, "mask": OpCost(0.0)} for name, of in costs.ops.items()}
    return graph, replace(costs, ops=ops)


def drawn_homes(seed: int, units: int, devices: int) -> list[int]:
    """Draw a pipeline or, every other time, any placement."""
    dice = random.Random(seed)
    if seed % 2:
        return [dice.randrange(devices) for _ in range(units)]
    cuts = sorted(dice.randrange(units + 1) for _ in range(devices - 1))
    return [sum(unit >= at for at in cuts) for unit in range(units)]


def simulated_s(graph: Graph, costs: Costs, placement: Placement, micro_batches: int) -> float:
    """Return what a step takes by the road that plans take: cut, schedule, simulate."""
    stages = cut(graph, placement, graph.batch)
    each, with_backward = stage_costs(graph, stages, costs), trained(graph, stages.stages)
    schedule = "forward" if graph.loss is None else "1f1b" if stages.is_chain else "list"
    programs = build(schedule, stages, micro_batches, each, with_backward)
    return simulate(programs, stages, each).step_s


def placed(known: Work, homes: list[int]) -> Placement:
    """Return the placement of homes by number."""
    return Placement(known.placed([f"d{home}" for home in homes], "d0"))
