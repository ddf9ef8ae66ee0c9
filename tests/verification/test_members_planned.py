"""The sequence between the sums of a tensor group, stores of members, and pins: plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import from_json, part_channels, write_placement
from bigbrain_fx.plan.nouns import to_json
from bigbrain_fx.plan.tensor import axis_choices
from tests.plan.test_offloading import with_stores
from tests.support.training import AXES, PAGES, bench_of, equal, grouped, planned, trained
from tools.conformance.matrix import Bench

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


def test_gradients_of_whole_parameters_are_one_message(heads: Bench) -> None:
    """Of norms and biases: members add what each has of them when the backward ends."""
    graph = grouped(heads, 2, **AXES).sharded.members[0]
    waiting = [op for op in graph.ops if op.target == "shard.copy_to_group" and op.params]
    numel = sum(op.outputs[0].numel for op in waiting)
    assert len(waiting) > 2
    (one,) = [c for c in part_channels(grouped(heads, 2, **AXES)) if c.numel == numel][:1]
    assert one.per_step == 4  # micro-batches


def test_bytes_of_each_axis_add_up_to_all_bytes(heads: Bench) -> None:
    plan = grouped(heads, 2, **AXES)
    (left,) = [c for c in axis_choices(plan) if "sequence" in c.name]
    without = grouped(heads, 2, tensor_axes=("heads", "hidden"))
    sent = [
        sum(c.nbytes for c in part_channels(each) if c.sender == "d0") for each in (plan, without)
    ]
    assert left.sent_bytes == sent[0] - sent[1]
    assert left.whole_s == without.forecast.step_s


def test_the_sequence_is_divided_unasked_where_that_is_faster(heads: Bench) -> None:
    """The same axes, whoever names them; never slower by forecast than without."""
    kinds = "heads", "hidden", "vocabulary"
    found, named = grouped(heads, 2), grouped(heads, 2, tensor_axes=kinds)
    both = grouped(heads, 2, tensor_axes=(*kinds, "sequence"))
    assert found.forecast.step_s <= min(named.forecast.step_s, both.forecast.step_s)


def test_a_name_that_is_none_is_told_the_nearest(heads: Bench) -> None:
    with pytest.raises(InputError, match="no axis 'sequences'") as caught:
        grouped(heads, 2, tensor_axes=("heads", "sequences"))
    assert "sequence" in str(caught.value.help)


def test_a_plan_of_an_older_version_is_written_as_it_was(heads: Bench) -> None:
    """So its key, by which processes know each other, is the same."""
    plan = grouped(heads, 2, **AXES)
    tensor = plan.placement.tensor
    assert tensor is not None
    assert b'"scatters":true' in to_json(plan)
    older = replace(plan, placement=replace(plan.placement, tensor=replace(tensor, scatters=False)))
    assert b"scatters" not in to_json(older)


def on_disk(capacity: int) -> Cluster:
    """Return two devices with stores, the second of half the rate."""
    found = with_stores(equal(2), capacity)
    fast, slow = found.stores
    return replace(found, stores=(fast, replace(slow, bytes_per_s=fast.bytes_per_s / 2)))


OF_TWO: dict[str, Any] = {"tensor": 2, "micro_batches": 4, "tensor_shares": (1, 1)}


def test_each_member_pays_for_its_own_store() -> None:
    bench = bench_of(PAGES)
    plan = planned(bench, on_disk(1 << 30), offload=("activations", "state"), **OF_TWO)
    fast, slow = plan.forecast.devices
    assert slow.moved_s == pytest.approx(2 * fast.moved_s)
    assert slow.stored_bytes == fast.stored_bytes
    assert from_json(to_json(plan), "plan.json") == plan
    without = planned(bench, equal(2), **OF_TWO)
    assert all(
        a.peak_bytes < b.peak_bytes
        for a, b in zip(plan.forecast.devices, without.forecast.devices, strict=True)
    )
    assert plan.forecast.step_s > without.forecast.step_s


def test_a_store_that_is_too_small_is_refused() -> None:
    with pytest.raises(NoPlanError, match="too small"):
        planned(bench_of(PAGES), on_disk(1000), offload=("state",), **OF_TWO)


PINS = (("embed", "d1"), ("blocks.0-2", "d3"), ("norm", "d0"), ("head", "d2"))


def test_modules_pinned_to_a_rank_are_on_its_group(heads: Bench) -> None:
    """d1 is of d0's group, d3 of d2's; what is divided is exchanged where it was placed."""
    plan = grouped(heads, 4, pins=PINS, tensor_shares=(3, 1))
    homes = {name: stage.device for stage in plan.stages.of_member(0) for name in stage.ops}
    found = {(op.module_path.split(".")[0], homes[op.name]) for op in plan.graph.ops}
    assert {("embed", "d0"), ("norm", "d0"), ("head", "d2")} <= found
    assert {homes[op.name] for op in plan.graph.ops if op.module_path.startswith("blocks.1")} == {
        "d2"
    }


@pytest.mark.nightly
def test_a_placement_of_groups_goes_out_and_comes_back(heads: Bench, tmp_path: Path) -> None:
    plan, file = grouped(heads, 4), tmp_path / "placement.json"
    write_placement(plan, file)
    again = grouped(heads, 4, place=str(file))
    assert (again.stages, again.forecast) == (plan.stages, plan.forecast)
    told = json.loads(file.read_text())
    assert set(told["modules"].values()) == {"d0", "d2"}
    told["modules"]["blocks.0"] = "d3"
    file.write_text(json.dumps(told))
    moved = grouped(heads, 4, place=str(file))
    assert moved.stages != plan.stages
    assert trained(heads, moved, tmp_path / "bundle")[1] == ""


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"pins": (("embed", "d0"), ("embed", "d2"))}, "embed is to be on d0 and on d2"),
        ({"pins": (("embed", "d9"),)}, "there is no device 'd9'"),
        ({"pins": (("embed", "d0"),), "partitioner": "auto"}, "does not go with --partitioner"),
    ],
)
def test_pins_of_groups_that_are_refused(
    heads: Bench, choices: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        grouped(heads, 4, **choices)
