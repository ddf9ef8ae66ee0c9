"""A plan is data: made from choices, saved, read, compared, and refused where it cannot be."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Cluster,
    Forward,
    OptimizerStep,
    Placement,
)
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    costs_of,
    from_json,
    make_plan,
    read_plan,
    replan,
    timeline,
    to_json,
    with_placement,
)
from bigbrain_fx.plan.schedule import check, stage_costs
from tests.support import samples
from tests.support.synthetic import chain_graph

GRAPH = chain_graph(1, 6)  # a batch of 4 rows


def plan_of(partitioner: str = "naive", devices: int = 2, **choices: object) -> Plan:
    options = replace(Options(partitioner, micro_batches=2), **choices)  # type: ignore[arg-type]  # by name
    return make_plan(GRAPH, samples.cluster(devices), Source("model.py"), options)


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return replace(cluster, devices=devices)


# --------------------------------------------------------------------------- choices


def test_a_plan_joins_the_rooms() -> None:
    plan = plan_of(micro_batches=4, seed=7)
    assert (plan.schedule, plan.micro_batches, plan.rows, plan.seed) == ("1f1b", 4, 1, 7)
    assert plan.stages.devices == ("d0", "d1")
    assert plan.trained == (0, 1)
    costs = stage_costs(GRAPH.at(plan.rows), plan.stages, costs_of(plan))
    trained = frozenset(plan.trained)
    assert check(plan.programs, plan.stages, trained=trained, costs=costs) == []
    assert plan.forecast.step_s > 0


def test_a_plan_written_before_stages_could_defer_is_read_as_it_is() -> None:
    text = to_json(plan_of()).replace(b',"deferred":[]', b"")
    assert b"deferred" not in text
    plan = from_json(text, "plan.json")
    assert plan == plan_of()
    assert plan.key == hashlib.sha256(text).hexdigest()[:16]


def test_a_plan_with_weights_that_wait_comes_back_from_its_text() -> None:
    plan = plan_of(devices=1)
    (stage,), (program,) = plan.stages.stages, plan.programs
    deferring = replace(plan.stages, stages=(replace(stage, deferred=stage.params[:1]),))
    after = (Backward(0, 1), BackwardWeight(0, 0), BackwardWeight(0, 1), OptimizerStep())
    instructions = (Forward(0, 0), Forward(0, 1), Backward(0, 0), *after)
    changed = replace(
        plan, stages=deferring, programs=(replace(program, instructions=instructions),)
    )
    assert from_json(to_json(changed), "plan.json") == changed


def test_chains_get_1f1b_and_others_the_list_scheduler() -> None:
    assert plan_of("naive").schedule == "1f1b"
    scattered = plan_of("scattered")
    assert not scattered.stages.is_chain
    assert scattered.schedule == "list"
    assert plan_of("naive", schedule="gpipe").schedule == "gpipe"


def test_a_chain_schedule_refuses_scattered_stages() -> None:
    with pytest.raises(InputError, match="gpipe"):
        plan_of("scattered", schedule="gpipe")


def test_the_fastest_number_of_micro_batches_is_taken() -> None:
    """Of those that divide the batch; all others are forecast to be no faster."""
    chosen = plan_of(micro_batches=None)
    steps = {count: plan_of(micro_batches=count).forecast.step_s for count in (1, 2, 4)}
    assert chosen.forecast.step_s == min(steps.values())
    assert steps[chosen.micro_batches] == min(steps.values())


@pytest.mark.parametrize("count", [0, -1, 3, 8])
def test_a_batch_that_cannot_be_split_so_says_how_it_can(count: int) -> None:
    with pytest.raises(InputError, match="batch of 4 rows cannot be split") as caught:
        plan_of(micro_batches=count)
    assert "1, 2, 4" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_trace_of_fixed_size_fixes_the_micro_batches() -> None:
    fixed = replace(GRAPH, static_batch=2)
    source, cluster = Source("model.py"), samples.cluster(2)
    assert make_plan(fixed, cluster, source, Options("naive")).micro_batches == 2
    with pytest.raises(InputError, match="holds for 2 rows only"):
        make_plan(fixed, cluster, source, Options("naive", micro_batches=4))


def test_too_little_memory_is_no_plan() -> None:
    small = with_memory(samples.cluster(2), 200)
    with pytest.raises(NoPlanError, match="memory") as caught:
        make_plan(GRAPH, small, Source("model.py"), Options("naive", micro_batches=2))
    assert caught.value.exit_code == 3
    assert caught.value.help


# --------------------------------------------------------------------------- again and elsewhere


def test_replan_keeps_the_choices_for_another_cluster() -> None:
    plan = plan_of(seed=3)
    again = replan(plan, samples.cluster(3))
    assert (again.partitioner, again.micro_batches, again.seed) == ("naive", 2, 3)
    assert len(again.stages.devices) == 3
    assert replan(plan, plan.cluster) == plan


def test_another_placement_of_the_same_plan() -> None:
    plan = plan_of(schedule="gpipe")
    dice = random.Random(0)
    moved = Placement({op.name: dice.choice(("d0", "d1")) for op in GRAPH.ops})
    other = with_placement(plan, moved)
    assert other.placement == moved
    assert other.micro_batches == plan.micro_batches
    back = with_placement(plan, plan.placement)
    assert (back.schedule, back.stages, back.programs) == (
        plan.schedule,
        plan.stages,
        plan.programs,
    )


def test_a_timeline_is_the_forecast_with_bars() -> None:
    plan = plan_of()
    found = timeline(plan)
    assert plan.forecast.timeline == ()
    assert found.timeline
    brief = tuple(replace(entry, held=()) for entry in found.devices)
    assert replace(found, timeline=(), devices=brief) == plan.forecast
    assert all(max(n for _, n in e.held) == e.peak_bytes for e in found.devices)
    assert max(bar.end_s for bar in found.timeline) == pytest.approx(plan.forecast.step_s)


# --------------------------------------------------------------------------- plan.json


@pytest.mark.gate("gpt-naive", "encdec-naive")
@pytest.mark.parametrize("partitioner", ["naive", "scattered"])
@pytest.mark.parametrize("model", samples.cases(("gpt", "unet", "encdec", "llama")))
def test_plans_round_trip(model: str, partitioner: str) -> None:
    plan = samples.plan(model, partitioner)
    text = to_json(plan)
    again = from_json(text, "plan.json")
    assert again == plan
    assert to_json(again) == text
    assert again.key == plan.key


def test_the_key_tells_plans_apart() -> None:
    keys = [
        plan_of().key,
        plan_of(seed=1).key,
        plan_of(micro_batches=4).key,
        plan_of(devices=3).key,
    ]
    assert len(set(keys)) == len(keys)
    assert plan_of().key == keys[0]
    assert all(len(key) == 16 for key in keys)


def test_a_plan_prints_a_line_per_device() -> None:
    first, *rest = str(plan_of()).splitlines()
    assert first.startswith("toy: 2 stages on 2 devices, 1f1b, 2 micro-batches of 2 rows")
    assert [line.split(":")[0].strip() for line in rest] == ["d0", "d1"]


def test_a_pipe_in_a_bundle_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"cannot read .*plan.json: it is no file"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "not a plan"),
        (b"[]", "not a plan"),
        (b'{"graph": 1}', "not a plan"),
        (b"\xff\xfe", "not a plan"),
        (b"[" * 50_000, "not a plan"),
    ],
)
def test_files_that_are_no_plan_are_refused(text: bytes, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        from_json(text, "here/plan.json")
    assert "here/plan.json" in str(caught.value)


def test_a_field_of_the_wrong_kind_is_named() -> None:
    fields = json.loads(to_json(plan_of()))
    fields["micro_batches"] = "many"
    with pytest.raises(InputError, match="micro_batches"):
        from_json(json.dumps(fields).encode(), "plan.json")


def test_a_newer_format_is_refused() -> None:
    newer = to_json(replace(plan_of(), format=99))
    with pytest.raises(InputError, match="format 99"):
        from_json(newer, "plan.json")


def test_a_plan_is_read_from_a_file_or_a_bundle(tmp_path: Path) -> None:
    plan = plan_of()
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    assert read_plan(tmp_path) == read_plan(tmp_path / "plan.json") == plan
    with pytest.raises(InputError, match="cannot read") as caught:
        read_plan(tmp_path / "nothing")
    assert caught.value.help
