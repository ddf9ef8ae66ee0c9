"""The bound of what devices hold: never below the plan's ledger, and exact as units move."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, strategies as st

from bigbrain_fx.core import Graph, Ref
from bigbrain_fx.plan.cut import cut, trained
from bigbrain_fx.plan.schedule import build, stage_costs
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.planning.unit_work import work
from partitioners.baechi import Ledger
from partitioners.chain_dp import upstream
from tests.support.examples import quick
from tests.support.placements import case, drawn_homes, placed, unlike
from tests.support.reserved import is_acyclic, reserved, scattered
from tests.support.synthetic import graph_of, op, random_costs

seeds = st.integers(0, 10_000)


@quick(40)
@given(seed=seeds, count=st.integers(1, 30), micro=st.sampled_from((1, 2, 4)), trains=st.booleans())
def test_is_never_below_the_ledger_of_the_plan(
    seed: int, count: int, micro: int, trains: bool
) -> None:
    """Pipelines and scattered ops. (A view that is sent holds what it is a view of: left out.)"""
    cluster = unlike(seed, 3)
    graph, costs = case(seed, count, cluster)
    graph = graph if trains else replace(_without_views(graph), loss=None)
    known = work(graph, costs)
    homes = drawn_homes(seed, len(known.groups), 3)
    bound = reserved(known, cluster, micro, [f"d{home}" for home in homes])
    stages = cut(graph, placed(known, homes), graph.batch)
    each, with_backward = stage_costs(graph, stages, costs), trained(graph, stages.stages)
    if trains:
        flights = None if stages.is_chain else (micro,) * len(stages.devices)
        schedule = "1f1b" if stages.is_chain else "list"
        programs = build(schedule, stages, micro, each, with_backward, flights)
    else:
        programs = build("forward", stages, micro, each, with_backward)
    for entry in simulate(programs, stages, each).devices:
        dead = sum(graph.op[name].outputs[0].nbytes for name, to in known.copies.items() if to < 0)
        assert entry.peak_bytes <= bound[entry.device] + dead


def _without_views(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(replace(op, view_of=None) for op in graph.ops))


@quick(40)
@given(seed=seeds, count=st.integers(1, 25), devices=st.integers(2, 3))
def test_a_unit_that_has_room_fits_once_it_is_there(seed: int, count: int, devices: int) -> None:
    cluster = unlike(seed, devices)
    graph, costs = case(seed, count, cluster)
    known = work(graph, costs)
    ledger = Ledger(known, cluster, 4)
    for unit, home in enumerate(drawn_homes(seed, len(known.groups), devices)):
        roomy = ledger.has_room(unit, home)
        ledger.move(unit, home)
        assert roomy == ledger.fits(home)


def test_a_pipeline_needs_no_more_than_scattered_ops() -> None:
    for seed in range(0, 40, 2):
        cluster = unlike(seed, 3)
        graph, costs = case(seed, 15, cluster)
        known = work(graph, costs)
        homes = [f"d{number}" for number in drawn_homes(seed, len(known.groups), 3)]
        assert is_acyclic(upstream(known, homes))
        wide = scattered(known, cluster, 4, homes)
        for device, total in reserved(known, cluster, 4, homes).items():
            assert total <= wide[device] + 50


def test_a_devices_inputs_are_found_in_any_order() -> None:
    """d0 has the first op and the last; d2 feeds d1, which feeds d0."""
    ops = [
        op("a", "aten.relu.default", Ref("x")),
        op("b", "aten.relu.default", Ref("x")),
        op("c", "aten.relu.default", Ref("b")),
        op("e", "aten.add.Tensor", Ref("a"), Ref("c")),
    ]
    graph = graph_of(ops)
    known = work(graph, random_costs(0, graph, unlike(0, 3)))
    found = upstream(known, ["d0", "d2", "d1", "d0"])
    assert found == {"d0": {"d1", "d2"}, "d2": set(), "d1": {"d2"}}
    assert is_acyclic(found)
    assert not is_acyclic(upstream(known, ["d0", "d1", "d0", "d1"]))
