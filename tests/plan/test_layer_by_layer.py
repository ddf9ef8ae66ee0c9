"""`--offload weights`: a stage for each layer, run in turn; its memory, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Backward,
    Cluster,
    Device,
    DeviceStore,
    Forward,
    Graph,
    ModuleCall,
    Offloaded,
    ParamRef,
    Ref,
    Saves,
)
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, Source, explain, from_json, make_plan, replan, to_json
from bigbrain_fx.plan.offloading import WORDS
from bigbrain_fx.plan.remedy import plan_or_remedy
from tests.support.synthetic import cluster_of, device, graph_of, op, tensor, weight

MIB = 2**20
WEIGHTS: tuple[Offloaded, ...] = ("weights",)
SOURCE = Source("model.py")


def layers(count: int, numbers: int = MIB // 4, out: int = 4) -> Graph:
    """Return products in a row, each a layer of its own that keeps what it read."""
    ops = [
        op(
            f"v{i}",
            "aten.linear.default",
            Ref(f"v{i - 1}" if i else "x"),
            ParamRef(f"w{i}"),
            out=tensor(out),
            modules=(ModuleCall("", "Net"), ModuleCall(f"blocks.{i}", "Block")),
            saves=Saves((0,), 0, 4096, 4096),
        )
        for i in range(count)
    ]
    return graph_of(ops, [weight(f"w{i}", numbers) for i in range(count)])


def with_stores(*devices: Device, rate: float = 1e9, capacity: int = 1 << 40) -> Cluster:
    stores = (DeviceStore(f"disk-{d.name}", d.name, capacity, rate, "/scratch") for d in devices)
    return replace(cluster_of(*devices), stores=tuple(stores))


ONE = with_stores(device("d0"))


def planned(graph: Graph, cluster: Cluster = ONE, **more: object) -> Plan:
    asked = {"offload": WEIGHTS, "micro_batches": 2, **more}
    return make_plan(graph, cluster, SOURCE, Options(**asked))  # type: ignore[arg-type]


def test_each_layer_is_a_stage_and_comes_once_for_forwards_and_once_for_backwards() -> None:
    plan = planned(layers(3))
    assert plan.stages.offload == WORDS
    assert plan.stages.recompute == (0, 1, 2)
    order = [i for i in plan.programs[0].instructions if isinstance(i, Forward | Backward)]
    ahead = [Forward(stage, micro) for stage in range(3) for micro in range(2)]
    back = [Backward(stage, micro) for stage in (2, 1, 0) for micro in range(2)]
    assert order == [*ahead, *back]
    assert from_json(to_json(plan), "plan.json") == plan
    assert replan(plan, ONE).stages == plan.stages


def test_memory_is_that_of_a_layer_and_the_store_has_all() -> None:
    fast = with_stores(device("d0"), rate=1e12)
    both = (planned(layers(count, out=MIB // 4), fast) for count in (8, 64))
    few, many = (plan.forecast.of("d0") for plan in both)
    received = 63 * 2 * MIB  # of two micro-batches
    assert many.stored_bytes == 4 * 64 * MIB + received
    assert many.peak_bytes == few.peak_bytes < 20 * MIB


def test_the_store_has_all_and_its_seconds_are_forecast() -> None:
    many = planned(layers(64)).forecast.of("d0")
    weights = 64 * MIB  # and as much in gradients, twice as much in AdamW's state
    assert 4 * weights <= many.stored_bytes < 4.01 * weights
    kept = planned(layers(64), offload=()).forecast.of("d0")
    assert many.peak_bytes < 0.05 * kept.peak_bytes
    # for all forwards, for all backwards and for the update, which writes; gradients and state
    moved_s = (3 + 1 + 2 + 4) * weights / 1e9
    assert many.moved_s == pytest.approx(moved_s, rel=0.01)


def test_explain_says_what_lies_where() -> None:
    said = explain(planned(layers(3))).offload
    assert "what stages received, what the optimizer keeps and weights and gradients of" in said


@pytest.mark.parametrize("partitioner", ["chain-dp", "auto", "naive"])
def test_a_model_of_four_times_the_memory_is_planned(partitioner: str) -> None:
    memory_bytes = 16 * MIB + (40 << 20)
    small = with_stores(device("d0", memory_bytes=memory_bytes))
    with pytest.raises(NoPlanError):
        planned(layers(64), small, offload=("activations", "state"), partitioner=partitioner)
    plan = planned(layers(64), small, partitioner=partitioner)
    assert plan.forecast.of("d0").stored_bytes > 4 * memory_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("has_stores", [True, False])
def test_reading_layer_by_layer_is_the_last_remedy(has_stores: bool) -> None:
    small = with_stores(device("d0", memory_bytes=16 * MIB + (40 << 20)))
    given = small if has_stores else replace(small, stores=())
    with pytest.raises(NoPlanError, match="d0") as caught:
        plan_or_remedy(layers(64), given, SOURCE, Options(micro_batches=2))
    assert str(caught.value.help).startswith("a plan was found with --offload weights")


def test_several_devices_have_their_layers_in_turn() -> None:
    pair = with_stores(device("d0"), device("d1"))
    plan = planned(layers(4), pair, partitioner="naive")
    assert [stage.device for stage in plan.stages.stages] == ["d0", "d0", "d1", "d1"]
