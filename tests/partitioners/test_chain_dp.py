"""`chain-dp` against brute force, against the ledger of the schedules, and on its own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Graph,
    Link,
    OpCost,
    Placement,
    Ref,
)
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan.cut import cut, trained
from bigbrain_fx.plan.schedule import build, stage_costs
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.planning.chain import Line, Split
from bigbrain_fx.planning.cutter import BestFirst, Cutter
from bigbrain_fx.planning.piece_memory import Setting
from bigbrain_fx.planning.unit_work import work
from bigbrain_fx.planning.units import unit_orders
from partitioners.chain_dp import MOST_STEPS, MOST_UNITS, ChainDP
from tests.support.brute_force import every_split, plain_fits, plain_step_s, unlike_cluster
from tests.support.examples import quick
from tests.support.reserved import reserved as bytes_of
from tests.support.rough import device_orders
from tests.support.synthetic import (
    GIB,
    chain_graph,
    cluster_of,
    device,
    op,
    random_costs,
    random_graph,
    tensor,
)

seeds = st.integers(0, 10_000)


# --------------------------------------------------------------------------- brute force


def as_split(placement: Placement, graph: Graph) -> tuple[list[str], list[int]]:
    homes = [placement.device_of[entry.name] for entry in graph.ops]
    starts = [i for i, home in enumerate(homes) if i == 0 or home != homes[i - 1]]
    return [homes[i] for i in starts], [*starts, len(homes)]


@quick(60)
@given(
    seed=seeds,
    count=st.integers(1, 8),
    devices=st.integers(1, 3),
    micro=st.sampled_from((1, 2, 8)),
    kib=st.sampled_from((4, 8, 16, 32, 1 << 20)),
    tied=st.booleans(),
)
def test_equals_brute_force(
    seed: int, count: int, devices: int, micro: int, kib: int, tied: bool
) -> None:
    graph = chain_graph(seed, count, tied=tied)
    cluster = unlike_cluster(seed, devices, (kib * 1024, kib * 2048))
    costs = random_costs(seed, graph, cluster)
    known = work(graph, costs)
    assert len(known.groups) == count
    fitting = [
        plain_step_s(graph, costs, sequence, cuts, micro)
        for sequence, cuts in every_split(graph, cluster)
        if plain_fits(known, cluster, sequence, cuts, micro)
    ]
    planner = ChainDP(micro_batches=micro, gap=0.0)
    if not fitting:
        return
    best = planner.best(known, cluster, [])
    assert best is not None
    sequence, cuts = as_split(Placement(known.placed(best[0].line.homes(best[1]))), graph)
    found = plain_step_s(graph, costs, sequence, cuts, micro)
    assert found <= min(fitting) * (1 + 1e-9)  # what fits for the plain rule does so for chains
    fastest = planner.fastest(known, cluster)
    assert fastest is not None
    assert fastest.step_s <= planner._paced(*best).step_s * (1 + 1e-8)


@quick(15)
@given(seed=seeds, count=st.integers(1, 8), devices=st.integers(1, 3))
def test_a_loose_gap_costs_no_more_than_it_says(seed: int, count: int, devices: int) -> None:
    graph = chain_graph(seed, count)
    cluster = unlike_cluster(seed, devices, (GIB,))
    known = work(graph, random_costs(seed, graph, cluster))
    line = Cutter(Line(known, range(known.count), known.count), Setting(cluster, 8))
    sequences = device_orders(cluster, 400)
    exact, loose = (_best_split(line, sequences, gap) for gap in (0.0, 0.05))
    assert exact.step_s(8) <= loose.step_s(8) <= exact.step_s(8) / 0.95


def _best_split(line: Cutter, sequences: Sequence[Sequence[str]], gap: float) -> Split:
    search = BestFirst(line)
    search.run(sequences, gap, MOST_STEPS)
    assert search.best is not None
    return search.best


# --------------------------------------------------------------------------- what it should do


def plain_chain(count: int, second: float = 1.0) -> tuple[Graph, dict[str, OpCost]]:
    graph = chain_graph(3, count, skips=False)
    return graph, {entry.name: OpCost(second, 2 * second) for entry in graph.ops}


def costs_of(cluster: Cluster, each: dict[str, OpCost], speeds: Sequence[float]) -> Costs:
    ops = {
        d.name: {
            name: replace(c, forward_s=c.forward_s / speed, backward_s=c.backward_s / speed)
            for name, c in each.items()
        }
        for d, speed in zip(cluster.devices, speeds, strict=True)
    }
    return Costs(ops, cluster, {d.name: 0.0 for d in cluster.devices})


def sizes(placement: Placement, graph: Graph) -> dict[str, int]:
    homes = [placement.device_of[entry.name] for entry in graph.ops]
    return {home: homes.count(home) for home in dict.fromkeys(homes)}


@pytest.mark.parametrize(
    ("count", "micro", "speeds", "expected"),
    [
        (8, 8, (1, 1, 1, 1), {"d0": 2, "d1": 2, "d2": 2, "d3": 2}),
        (12, 32, (1, 3), {"d0": 3, "d1": 9}),
        (4, 4, (1, 0.001), {"d0": 4}),  # a useless device is left out
    ],
)
def test_parts_are_as_large_as_devices_are_fast(
    count: int, micro: int, speeds: Sequence[float], expected: dict[str, int]
) -> None:
    graph, each = plain_chain(count)
    cluster = cluster_of(*(device(f"d{i}", speed) for i, speed in enumerate(speeds)))
    placement = ChainDP(micro).partition(graph, cluster, costs_of(cluster, each, speeds))
    assert sizes(placement, graph) == expected


def test_a_useless_device_is_used_if_asked_for() -> None:
    graph, each = plain_chain(4)
    cluster = cluster_of(device("fast"), device("snail", 0.001))
    costs = costs_of(cluster, each, (1, 0.001))
    forced = ChainDP(4, use_all=True).partition(graph, cluster, costs)
    assert sorted(sizes(forced, graph).values()) == [1, 3]


def test_neighbours_are_those_with_the_fast_links() -> None:
    """a and c are near each other, c and b too, a and b far: the pipeline is a-c-b or b-c-a."""
    graph, each = plain_chain(6)
    near, far = Link(0.0, 1e9), Link(10.0, 1e2)
    devices = (device("a"), device("b"), device("c"))
    links = (("a", "b", far), ("a", "c", near), ("b", "c", near))
    cluster = Cluster(devices, near, links)
    placement = ChainDP(8).partition(graph, cluster, costs_of(cluster, each, (1, 1, 1)))
    assert list(sizes(placement, graph)) in (["a", "c", "b"], ["b", "c", "a"])


def test_memory_shifts_the_cut() -> None:
    graph, each = plain_chain(8)
    each = {name: replace(cost, saved_bytes=1 << 20) for name, cost in each.items()}
    cluster = cluster_of(device("small", memory_bytes=5 << 20), device("large"))
    costs = costs_of(cluster, each, (1, 1))
    placement = ChainDP(4).partition(graph, cluster, costs)
    homes = sizes(placement, graph)
    assert list(homes) == ["large", "small"]  # the last stage keeps one micro-batch, not two
    assert homes == {"large": 4, "small": 4}


def test_gpipe_holds_every_micro_batch() -> None:
    graph, each = plain_chain(8)
    each = {name: replace(cost, saved_bytes=1 << 20) for name, cost in each.items()}
    cluster = cluster_of(device("d0", memory_bytes=10 << 20), device("d1", memory_bytes=10 << 20))
    costs = costs_of(cluster, each, (1, 1))
    assert sizes(ChainDP(4).partition(graph, cluster, costs), graph) == {"d0": 4, "d1": 4}
    with pytest.raises(NoPlanError, match="no split fits") as caught:
        ChainDP(4, in_flight=4).partition(graph, cluster, costs)
    assert set((caught.value.nearest or {}).values()) == {"d0", "d1"}


def test_more_devices_than_ops_cannot_all_be_used() -> None:
    graph, each = plain_chain(2)
    cluster = cluster_of(*(device(f"d{i}") for i in range(3)))
    costs = costs_of(cluster, each, (1, 1, 1))
    with pytest.raises(NoPlanError, match="3 devices cannot share 2 groups") as caught:
        ChainDP(2, use_all=True).partition(graph, cluster, costs)
    assert caught.value.help == "use at most 2 devices, or let the planner leave some out"


def test_the_reason_names_each_cut() -> None:
    graph, each = plain_chain(4)
    cluster = cluster_of(device("d0"), device("d1"))
    reason = ChainDP(8).partition(graph, cluster, costs_of(cluster, each, (1, 1))).reason
    head, cut_line = reason.splitlines()
    assert "2 of 2 devices, d0 -> d1" in head
    assert cut_line.startswith("d0 | d1: after v1; ")


# --------------------------------------------------------------------------- its parts


@quick(60)
@given(seed=seeds, count=st.integers(2, 15))
def test_pieces_need_what_a_placement_of_them_needs(seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    cluster = cluster_of(device("d0"), device("d1"))
    known = work(graph, random_costs(seed, graph, cluster))
    units, setting = known.count, Setting(cluster, 8)
    line = Line(known, range(units), units)
    for cut_at in range(1, units):
        homes = ["d0" if unit < cut_at else "d1" for unit in range(units)]
        bound = bytes_of(known, cluster, 8, homes)
        flight = 2 if any(a < cut_at <= b for a, b in known.edges) else 1
        piece = line.bytes_needed("d0", flight, setting)[0, cut_at]
        assert bound["d0"] <= piece + 1  # a line that may be cut elsewhere knows less


@pytest.mark.nightly
@quick(60)
@given(seed=seeds, count=st.integers(2, 20), devices=st.integers(2, 4), gpipe=st.booleans())
@example(seed=1, count=11, devices=4, gpipe=False)  # a gradient through a stage beside
@example(seed=39, count=5, devices=3, gpipe=False)  # the last gradient leaves during the update
def test_reserved_memory_covers_the_schedules(
    seed: int, count: int, devices: int, gpipe: bool
) -> None:
    micro = 5
    graph = random_graph(seed, count)
    cluster = cluster_of(*(device(f"d{i}") for i in range(devices)))
    costs = random_costs(seed, graph, cluster)
    known = work(graph, costs)
    planner = ChainDP(
        micro, in_flight=micro if gpipe else None, use_all=len(known.groups) >= devices
    )
    placement = planner.partition(graph, cluster, costs)
    stages = cut(graph, placement, graph.batch)
    per_stage = stage_costs(graph, stages, costs)
    schedule = "gpipe" if gpipe else "1f1b"
    programs = build(schedule, stages, micro, per_stage, trained(graph, stages.stages))
    homes = [placement.device_of[group[0]] for group in known.groups]
    reserved = bytes_of(known, cluster, micro, homes, planner.in_flight)
    for entry in simulate(programs, stages, per_stage).devices:
        assert entry.peak_bytes <= reserved[entry.device]


@quick(60)
@given(seed=seeds, count=st.integers(1, 25))
def test_orders_are_topological(seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    cluster = cluster_of(device("d0"))
    known = work(graph, random_costs(seed, graph, cluster))
    for order in unit_orders(len(known.groups), known.edges):
        place = {unit: i for i, unit in enumerate(order)}
        assert sorted(order) == list(range(len(known.groups)))
        assert all(place[maker] < place[reader] for maker, reader in known.edges)


def test_depth_first_finishes_a_branch() -> None:
    """Two branches, listed in turns: 0 -> 1 -> 3 -> 5 and 0 -> 2 -> 4 -> 5."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    given_order, depth_first, late = unit_orders(6, edges)
    assert given_order == (0, 1, 2, 3, 4, 5)
    assert depth_first == (0, 1, 3, 2, 4, 5)
    assert late == (0, 2, 4, 1, 3, 5)


def test_alike_devices_are_not_tried_in_two_orders() -> None:
    alike = cluster_of(*(device(f"d{i}") for i in range(6)))
    assert set(device_orders(alike, 400)) == {
        tuple(f"d{i}" for i in range(length)) for length in range(1, 7)
    }
    two_kinds = cluster_of(device("a"), device("b", 2), device("a2"))
    assert len([order for order in device_orders(two_kinds, 400) if len(order) == 3]) == 3
    unlike = cluster_of(*(device(f"d{i}", 1 + i) for i in range(5)))
    assert len(device_orders(unlike, 400)) == 325


def test_many_unlike_devices_are_not_tried_in_every_order() -> None:
    unlike = cluster_of(*(device(f"d{i}", 1 + i * 7 % 9) for i in range(9)))
    sequences = device_orders(unlike, 400)
    assert len(sequences) < 400
    assert {len(sequence) for sequence in sequences} == set(range(1, 10))


# --------------------------------------------------------------------------- large graphs


def deep_graph(count: int) -> tuple[Graph, Cluster, Costs]:
    graph = chain_graph(5, count)
    cluster = unlike_cluster(1, 4, (GIB,))
    cluster = replace(cluster, links=(), default_link=Link(1e-5, 1e9))
    return graph, cluster, random_costs(5, graph, cluster)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("count", "limit_s"), [(700, 4.0), pytest.param(2000, 10.0, marks=pytest.mark.nightly)]
)
def test_large_graphs_are_planned_in_seconds(count: int, limit_s: float) -> None:
    """The limits are four times what one quiet core takes."""
    graph, cluster, costs = deep_graph(count)
    start = time.process_time()
    placement = ChainDP(8).partition(graph, cluster, costs)
    took_s = time.process_time() - start
    assert len(set(placement.device_of.values())) == 4
    assert took_s < limit_s


def test_merging_neighbours_keeps_the_numbers() -> None:
    graph, cluster, costs = deep_graph(MOST_UNITS + 300)
    cutter = next(ChainDP(8).cutters(work(graph, costs), cluster))
    known = work(graph, costs)
    assert cutter.line.count <= MOST_UNITS + 2
    assert cutter.unit_s("d1").sum() == pytest.approx(
        known.seconds["d1"].sum() + known.once_s["d1"].sum() / 8
    )


def test_a_value_that_is_read_far_away_counts_at_every_cut_between() -> None:
    ops = [
        op("a", "aten.linear.default", out=tensor(10)),
        op("b", "aten.linear.default", Ref("a"), out=tensor(1)),
        op("c", "aten.linear.default", Ref("a"), Ref("b"), out=tensor(1)),
    ]
    graph = replace(chain_graph(0, 1), ops=tuple(ops), outputs=("c",), loss="c", params=())
    cluster = cluster_of(device("d0"))
    line = Line(work(graph, random_costs(0, graph, cluster)), range(3), 3)
    assert list(line.crossing.forward_bytes) == [0, 40, 44, 0]
