"""Plans of tensor groups: the sequence, stores, pins, batches of few rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.core import Cluster, Graph, Op, Param, ParamRef, Ref, TensorSpec
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Plan, from_json, part_channels, write_placement
from bigbrain_fx.plan.nouns import to_json
from bigbrain_fx.plan.tensor import axis_choices
from bigbrain_fx.plan.tensor.messages import require_growing
from bigbrain_fx.runtime import joined
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.weights import part_name
from tests.plan.test_offloading import with_stores
from tests.support.bundles import uneven
from tests.support.synthetic import graph_of
from tests.support.training import (
    AXES,
    HEADS,
    PAGES,
    SHARED,
    bench_of,
    equal,
    grouped,
    planned,
    trained,
    with_own_optimizer,
)
from tools.conformance.forms import loop
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


# --------------------------------------------------------------------------- few rows


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "choices"), [(SHARED, {}), (HEADS, AXES)], ids=["shared weight", "sequence"]
)
def test_a_group_trains_as_a_plain_loop_does(text: str, choices: dict[str, Any]) -> None:
    """The plain loop of `tools.conformance.forms` weighs micro-batches by their rows."""
    bench = bench_of(uneven(text.replace("0.1", "0.0")), steps=4)
    given = {"tensor": 2, "micro_batches": 4, "tensor_shares": (3, 1), **choices}
    plan = with_own_optimizer(planned(bench, equal(2), **given))
    actual, fault = trained(bench, plan)
    assert fault == ""
    as_a_plain_loop(plan, actual, bench.file.path, 4)


def as_a_plain_loop(plan: Plan, actual: Trace, model: Path, steps: int) -> None:
    """Hold what a bundle made against a loop of plain PyTorch."""
    losses, tensors = loop.train(model, steps)
    assert [float(each) for each in actual.losses] == pytest.approx(losses, rel=1e-5)
    shards = {(shard.param, shard.member): shard for shard in plan.sharded.shards}
    for name, tensor in tensors.items():
        own = [shards[name, m] for m in range(plan.stages.members) if (name, m) in shards]
        parts = [actual.tensors[part_name(name, shard.member)] for shard in own]
        lengths = [shard.stop - shard.start for shard in own]
        found = joined(parts, own[0].dim, own[0].inner, lengths) if own else actual.tensors[name]
        assert torch.allclose(found, tensor, rtol=1e-5, atol=1e-6), name


def exchanging(*shape: int | str) -> Graph:
    """Return a graph with one exchange, of a value of this shape."""
    spec = TensorSpec(shape, "float32", (1,) * len(shape), True)
    made = Op("made", "aten.relu.default", (Ref("x"),), outputs=(spec,), source="net.py:7")
    sent = Op("sent", "shard.all_reduce", (Ref("made"),), outputs=(spec,))
    return graph_of([made, sent])


@pytest.mark.parametrize("shape", [(), ("B",), ("2*B", 3), (4, "B")])
def test_values_that_grow_with_rows_and_single_numbers_are_sent(
    shape: tuple[int | str, ...],
) -> None:
    require_growing(replace(exchanging(*shape), batch=8))


@pytest.mark.parametrize("shape", [(1,), (4, 3), ("B", "B"), ("1 + B", 3)])
def test_values_that_do_not_grow_with_rows_are_refused(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(InputError, match=r"exchange 'made', .* does not grow") as caught:
        require_growing(replace(exchanging(*shape), batch=8))
    assert caught.value.at == "net.py:7"


def test_a_weights_gradient_is_known_without_rows() -> None:
    weight = Param("scale", TensorSpec((4,), "float32", (1,), True), "scale")
    spec, frozen = weight.spec, replace(weight, spec=replace(weight.spec, requires_grad=False))
    sent = Op("sent", "shard.all_gather", (ParamRef("scale"), 0, 1, (3, 1)), outputs=(spec,))
    require_growing(replace(graph_of([sent], [weight]), batch=8))
    with pytest.raises(InputError, match="does not grow"):
        require_growing(replace(graph_of([sent], [frozen]), batch=8))
