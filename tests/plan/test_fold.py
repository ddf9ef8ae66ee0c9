"""Several pieces a device: a line of devices folded, what is refused, orders under tight memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import Backward, BackwardWeight, Cluster, Forward, Program
from bigbrain_fx.emit.files.schedule_text import MicroAction, is_readable, roll
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    explain,
    from_json,
    make_plan,
    plan_placed,
    to_json,
    with_placement,
)
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.schedule import check
from tests.support import samples
from tests.support.synthetic import chain_graph

GRAPH = chain_graph(1, 12)  # a batch of 4 rows
LONG = replace(GRAPH, batch=64)


def plan_of(schedule: str, devices: int = 2, micro_batches: int = 4, **more: Any) -> Plan:
    options = Options("naive", schedule=schedule, micro_batches=micro_batches)
    graph = more.pop("graph", GRAPH)
    return make_plan(graph, samples.cluster(devices), Source("model.py"), replace(options, **more))


def homes(plan: Plan) -> str:
    return " ".join(stage.device for stage in plan.stages.stages)


def first_with(cluster: Cluster, memory_bytes: int) -> Cluster:
    first, *others = cluster.devices
    return replace(cluster, devices=(replace(first, memory_bytes=memory_bytes), *others))


@pytest.mark.parametrize(
    ("schedule", "devices", "more", "expected"),
    [
        ("interleaved", 2, {}, "d0 d1 d0 d1"),
        ("interleaved", 3, {}, "d0 d1 d2 d0 d1 d2"),
        ("interleaved", 2, {"pieces": 3}, "d0 d1 d0 d1 d0 d1"),
        ("zb-v", 2, {}, "d0 d1 d1 d0"),
        ("zb-v", 3, {}, "d0 d1 d2 d2 d1 d0"),
        ("dualpipe-v", 2, {}, "d0 d1 d1 d0"),
    ],
)
def test_a_line_is_folded(schedule: str, devices: int, more: dict[str, Any], expected: str) -> None:
    plan = plan_of(schedule, devices, 2 if schedule == "interleaved" else 4, **more)
    assert homes(plan) == expected
    assert plan.schedule == schedule
    assert check(plan.programs, plan.stages, trained=frozenset(plan.trained)) == []
    assert f"{len(plan.stages.stages)} pieces in a" in plan.placement.reason
    assert from_json(to_json(plan), "plan.json") == plan


def steps(program: Program) -> list[MicroAction]:
    return [
        MicroAction(f"{i.do}_{i.stage}", i.micro)
        for i in program.instructions
        if isinstance(i, Forward | Backward | BackwardWeight)
    ]


@pytest.mark.gate("4", "16")
@pytest.mark.parametrize("micro_batches", [4, 8, 16, 32, 64])
def test_two_by_two_interleaved_is_twelve_statements_for_any_number(micro_batches: int) -> None:
    options = Options("naive", schedule="interleaved", micro_batches=micro_batches)
    plan = make_plan(LONG, samples.cluster(2), Source("model.py"), options)
    for program in plan.programs:
        assert sum(len(loop.body) for loop in roll(steps(program))) <= 12


@pytest.mark.gate("zb-v")
@pytest.mark.parametrize("schedule", ["zb-v", "auto"])
def test_a_program_is_loops_or_a_table_that_a_reader_is_told_of(schedule: str) -> None:
    options = Options("naive", schedule=schedule, micro_batches=32)
    plan = make_plan(LONG, samples.cluster(2), Source("model.py"), options)
    assert all(is_readable(roll(steps(program))) for program in plan.programs)


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("more", "what", "remedy"),
    [
        ({"devices": 1}, "goes over several devices, and all", "use more devices"),
        ({"replicas": 2}, "and 2 of 2 replicas have one", "leave --replicas out"),
        ({"replicas": 2, "devices": 3}, "and 1 of 2 replicas has one", "leave --replicas out"),
        ({"partitioner": "scattered"}, "folds a line of one piece a device", "chain-dp or naive"),
        ({"pieces": 40}, "needs 80 pieces, and the model has", "use --virtual-stages"),
        ({"devices": 12}, "needs 24 pieces, and the model has", "fewer devices"),
        ({"in_flight": (1, 1)}, "says itself how many", "--schedule list"),
    ],
)
def test_plans_without_virtual_stages_are_refused_with_a_remedy(
    more: dict[str, Any], what: str, remedy: str
) -> None:
    with pytest.raises(InputError, match=what) as caught:
        plan_of("interleaved", **more)
    assert remedy in str(caught.value.help)


def test_each_replica_is_folded_by_itself() -> None:
    stages = plan_of("interleaved", replicas=2, devices=4).stages
    lines = [[stage.device for stage in stages.of_replica(number)] for number in (0, 1)]
    assert lines == [["d0", "d1"] * 2, ["d2", "d3"] * 2]


def test_of_replicas_it_is_said_whose_micro_batches_a_remedy_counts() -> None:
    """It told a step of 4 micro-batches, 2 for each of two replicas, to use 4."""
    with pytest.raises(InputError, match="stages, 4, not 2") as caught:
        plan_of("dualpipe-v", 4, 4, replicas=2, graph=replace(GRAPH, batch=16))
    assert caught.value.help == "use --micro-batches with one of 4, 8, or --schedule zb-v"
    assert caught.value.notes == ("the numbers are of one replica; all 2 have 2 times as many",)


def test_of_unequal_shares_a_remedy_counts_what_that_replica_has_of_all() -> None:
    """It said "2 times", with which the numbers were those that had just been refused."""
    asked: dict[str, Any] = {"replicas": 2, "devices": 4, "replica_shares": (3, 1)}
    with pytest.raises(InputError, match="stages, 4, not 2") as caught:
        plan_of("dualpipe-v", micro_batches=8, graph=replace(GRAPH, batch=16), **asked)
    assert caught.value.help == "use --micro-batches 4, or --schedule zb-v"
    assert caught.value.notes == ("the numbers are of one replica; all 2 have 4 times as many",)
    plan = plan_of("dualpipe-v", micro_batches=16, graph=replace(GRAPH, batch=16), **asked)
    assert plan.schedule == "dualpipe-v"


@pytest.mark.parametrize(
    ("schedule", "devices", "batch", "asked", "remedy"),
    [
        ("dualpipe-v", 2, 6, 3, "use --micro-batches 6, or --schedule zb-v"),  # was 4, of 6 rows
        ("dualpipe-v", 4, 6, 3, "use --schedule zb-v"),  # was 8, of 6 rows
        ("interleaved", 2, 9, 9, "use --micro-batches with one of 1, 3, or --schedule 1f1b"),
        ("interleaved", 2, 15, 2, "use --micro-batches with one of 1, 3; or let"),  # 5: of 15, too
        ("dualpipe-v", 2, 8, 3, "use --micro-batches with one of 4, 8; or let"),
        ("1f1b", 2, 8, 3, "use --micro-batches with one of 1, 2, 4, 8; or let"),
    ],
)
def test_a_remedy_has_numbers_that_batch_and_schedule_take(
    schedule: str, devices: int, batch: int, asked: int, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        plan_of(schedule, devices, asked, graph=replace(GRAPH, batch=batch))
    assert str(caught.value.help).startswith(remedy)


def test_a_placement_by_hand_is_not_moved() -> None:
    """A pin holds under 1f1b and auto; a fold would cut the line anew."""
    options = Options("naive", schedule="interleaved", micro_batches=4, pins=(("layers", "d0"),))
    with pytest.raises(InputError, match="would move what was placed by hand") as caught:
        make_plan(GRAPH, samples.cluster(2), Source("model.py"), options)
    assert "--schedule auto" in str(caught.value.help)


def test_uneven_rounds_are_refused_and_left_out_where_the_number_is_open() -> None:
    options = Options("naive", schedule="interleaved", micro_batches=9)
    nine = replace(GRAPH, batch=9)
    with pytest.raises(InputError, match="9 on 2 devices make 4 rounds"):
        make_plan(nine, samples.cluster(2), Source("model.py"), options)
    found = make_plan(
        nine, samples.cluster(2), Source("model.py"), replace(options, micro_batches=None)
    )
    assert found.micro_batches in (1, 3)


# --------------------------------------------------------------------------- searched


@pytest.mark.nightly
def test_a_searched_order_is_no_slower_than_what_has_a_name() -> None:
    searched = plan_of("auto", 3)
    assert searched.stages.is_chain
    assert searched.forecast.step_s <= plan_of("1f1b", 3).forecast.step_s * 1.02
    assert searched == plan_of("auto", 3)


@pytest.mark.nightly
def test_a_searched_order_keeps_to_the_memory_down_to_one_micro_batch() -> None:
    source = Source("model.py")
    options = Options("naive", schedule="auto", micro_batches=16)
    loose = make_plan(LONG, samples.cluster(2), source, options)
    serial = make_plan(
        LONG, samples.cluster(2), source, replace(options, schedule="list", in_flight=(1, 1))
    )

    def needs(plan: Plan) -> int:
        return needed_bytes(plan.forecast.of("d0"), plan.cluster.device["d0"])

    assert needs(serial) < needs(loose)
    for share in (0.0, 0.3, 0.7):
        memory = int(needs(serial) + share * (needs(loose) - needs(serial))) + 1
        where = first_with(samples.cluster(2), memory)
        tight = plan_placed(LONG, where, source, options, loose.placement)
        assert needs(tight) <= memory
        assert tight.forecast.step_s <= serial.forecast.step_s * 1.01
    where = first_with(samples.cluster(2), needs(serial) - 2000)
    with pytest.raises(NoPlanError, match="would run out of memory"):
        plan_placed(LONG, where, source, options, loose.placement)


def test_a_folded_plan_keeps_its_schedule_on_devices_of_other_names() -> None:
    plan = plan_of("interleaved")
    assert with_placement(plan, plan.placement).schedule == "interleaved"


# --------------------------------------------------------------------------- explained


@pytest.mark.nightly
def test_explain_says_what_was_found_and_how_near_the_bound() -> None:
    text = explain(plan_of("auto", 3)).order
    assert "order: auto, " in text
    assert "the best that was found under the devices' memory" in text
    assert "in a row, since nothing is clipped: no order of these stages takes less than" in text
    clipped = make_plan(
        GRAPH,
        samples.cluster(2),
        Source("model.py", clip_norm=1.0),
        Options("naive", schedule="interleaved", micro_batches=4),
    )
    assert "alone, since gradients are clipped" in explain(clipped).order
    assert explain(plan_of("1f1b")).order == ""


def test_the_orders_clock_is_the_simulators() -> None:
    """What explain calls a step alone is the forecast, but for norms and tied gradients."""
    for schedule in ("interleaved", "zb-v", "auto"):
        plan = plan_of(schedule)
        said = float(explain(plan).order.split("a step alone takes ")[1].split(" s")[0])
        assert said == pytest.approx(plan.forecast.step_s, rel=1e-3)
