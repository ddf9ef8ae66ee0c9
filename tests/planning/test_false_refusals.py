"""`auto` finds a plan wherever one fits: exhaustive cuts and micro-batches in flight on chains.

What fits is judged by the product's own ledger, as a plan's forecast has it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest

from bigbrain_fx.core import Cluster, Graph, Link, Op, Param, ParamRef, Placement, Ref, Saves
from bigbrain_fx.plan import Options, Plan, Source, make_plan, plan_placed
from bigbrain_fx.plan.memory_check import needed_bytes
from tests.support.synthetic import GIB, cluster_of, device, graph_of, op, tensor, weight

MICRO, ROWS = 4, 4
SOURCE = Source("model.py")


def chain(seed: int, count: int, measured: bool) -> Graph:
    """Draw products and element-wise ops in a row, activations of gigabytes, small weights."""
    dice = random.Random(seed)
    ops: list[Op] = []
    params: list[Param] = []
    width = 10**7
    for i in range(count):
        source, before = Ref(ops[-1].name if ops else "x"), width
        product_ = i == 0 or dice.random() < 0.5
        width = dice.choice((10**7, 2 * 10**7, 4 * 10**7)) if product_ else width
        out = replace(tensor(1, width), shape=("B", width))
        args: list[object] = [source]
        if product_:
            params.append(weight(f"w{i}", dice.choice((10**6, 10**7))))
            args.append(ParamRef(f"w{i}"))
        kept = dice.choice((0, 0, -1))
        saves = Saves((kept,), 0, f"{4 * width}*B", f"{4 * before}*B") if measured else None
        made = op(f"v{i}", "aten.linear.default" if product_ else "aten.gelu.default")
        sizes = {"flops": 10**7, "writes_bytes": f"{4 * width}*B", "reads_bytes": f"{4 * before}*B"}
        ops.append(replace(made, args=tuple(args), saves=saves, outputs=(out,), **sizes))  # type: ignore[arg-type]
    total = op("loss", "aten.sum.default", Ref(ops[-1].name), out=tensor(1))
    saves = Saves((), 0, 4, f"{4 * width}*B") if measured else None
    graph = graph_of([*ops, replace(total, flops=10**6, saves=saves)], params, rows=ROWS)
    entry = replace(graph.inputs[0], spec=replace(graph.inputs[0].spec, shape=("B", 4)))
    return replace(graph, inputs=(entry,), batch=ROWS)


def cluster(memory_bytes: int, devices: int = 2) -> Cluster:
    every = (device(f"d{i}", 1 + i, memory_bytes) for i in range(devices))
    return cluster_of(*every, link=Link(1e-5, 1e9))


def least_memory(graph: Graph, wide: Cluster) -> int:
    """Return the least memory with which some cut, order and number in flight fits."""
    return min(
        max(needed_bytes(entry, wide.device[entry.device]) for entry in plan.forecast.devices)
        for plan in every_plan(graph, wide)
    )


def every_plan(graph: Graph, wide: Cluster) -> Iterator[Plan]:
    names = [d.name for d in wide.devices]
    ops = [entry.name for entry in graph.ops]
    for used in range(1, len(names) + 1):
        for sequence in permutations(names, used):
            for inner in combinations(range(1, len(ops)), used - 1):
                cuts = [0, *inner, len(ops)]
                homes = {
                    name: d
                    for d, a, b in zip(sequence, cuts[:-1], cuts[1:], strict=True)
                    for name in ops[a:b]
                }
                for flight in product(range(1, MICRO + 1), repeat=used):
                    if list(flight) == sorted(flight, reverse=True) and flight[-1] == 1:
                        options = Options(
                            "naive", micro_batches=MICRO, schedule="1f1b", in_flight=flight
                        )
                        yield plan_placed(graph, wide, SOURCE, options, Placement(homes))


@pytest.mark.gate("0-False", "1-False")
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_plans_with_three_percent_to_spare_are_found(seed: int, measured: bool) -> None:
    graph = chain(seed, 5 + seed % 3, measured)
    least = least_memory(graph, cluster(10**6 * GIB))
    options = Options("auto", micro_batches=MICRO, effort="fast", recompute=())
    plan = make_plan(graph, cluster(int(1.03 * least)), SOURCE, options)
    assert all(e.peak_bytes < 1.03 * least for e in plan.forecast.devices)
