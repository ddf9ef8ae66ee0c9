"""What lies in stores: what is asked and refused, bytes and seconds, and when it is the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bigbrain_fx.core import Cluster, DeviceStore, Graph, Offloaded, ParamRef, Ref, Saves
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Plan, Source, explain, from_json, make_plan, to_json
from bigbrain_fx.plan.offloading import read_offload
from bigbrain_fx.plan.remedy import plan_or_remedy
from tests.support.synthetic import cluster_of, device, graph_of, op, weight

MIB = 2**20
PAIR = cluster_of(device("d0"), device("d1"))
RATE = 1e9
STATE: tuple[Offloaded, ...] = ("state",)
SIZES = (MIB, MIB // 2, 100, MIB, MIB // 4, 200)  # numbers; d0 gets the first half of them


def with_stores(cluster: Cluster, capacity: int = 1 << 30, rate: float = RATE) -> Cluster:
    stores = (
        DeviceStore(f"disk-{d.name}", d.name, capacity, rate, "/scratch") for d in cluster.devices
    )
    return replace(cluster, stores=tuple(stores))


def products(sizes: Sequence[int]) -> Graph:
    """Return products in a row, each with so many numbers of its own."""
    ops = [
        op(f"v{i}", "aten.linear.default", Ref(f"v{i - 1}" if i else "x"), ParamRef(f"w{i}"))
        for i in range(len(sizes))
    ]
    return graph_of(ops, [weight(f"w{i}", size) for i, size in enumerate(sizes)])


GRAPH = products(SIZES)


def planned(cluster: Cluster, **more: object) -> Plan:
    return make_plan(
        GRAPH,
        cluster,
        Source("model.py"),
        Options("naive", micro_batches=2, **more),  # type: ignore[arg-type]
    )


def test_words_are_read_and_the_nearest_is_named() -> None:
    assert read_offload(None) == read_offload("none") == ()
    assert read_offload("state") == STATE
    assert read_offload("state, activations") == ("activations", "state")
    with pytest.raises(InputError, match="no 'stat' to offload") as caught:
        read_offload("stat")
    assert "did you mean state?" in str(caught.value.help)


def test_bytes_and_seconds_are_forecast() -> None:
    plain, stored = planned(with_stores(PAIR)), planned(with_stores(PAIR), offload=STATE)
    for device_, large, small in (("d0", 6 * MIB, 400), ("d1", 5 * MIB, 800)):
        before, after = plain.forecast.of(device_), stored.forecast.of(device_)
        assert before.optimizer_bytes == 2 * (large + small)
        assert (after.stored_bytes, after.optimizer_bytes) == (2 * large, 2 * small)
        assert before.peak_bytes - after.peak_bytes == 2 * large - 8 * MIB  # one piece is here
        assert after.busy_s - before.busy_s == pytest.approx(2 * 2 * large / RATE)


def test_explain_and_the_plan_say_what_lies_where() -> None:
    stored = planned(with_stores(PAIR), offload=STATE)
    said = "12.0 MiB of d0 in disk-d0 (0.0252 s to read and write a step)"
    assert said in str(stored)
    assert said in explain(stored).offload
    assert from_json(to_json(stored), "plan.json") == stored


def test_offload_of_less_than_a_page_says_that_nothing_changes() -> None:
    small, options = products((100, 1023)), Options("naive", micro_batches=2, offload=STATE)
    stored = make_plan(small, with_stores(PAIR), Source("model.py"), options)
    assert "nothing lies in stores: what is kept for a parameter of less than 4,096" in str(stored)


SAVING = ("activations",)


def kept(cluster: Cluster, target: str = "aten.linear.default", **more: object) -> Plan:
    """Plan a graph whose products keep what they read, as autograd does."""
    made = (replace(GRAPH.ops[0].outputs[0], shape=(4 * MIB,), strides=(1,)),)
    saves = Saves((0,), 0, 16 * MIB, 16 * MIB)
    ops = tuple(replace(each, target=target, outputs=made, saves=saves) for each in GRAPH.ops)
    graph = replace(GRAPH, ops=ops)
    args = graph, cluster, Source("model.py"), Options("naive", micro_batches=2, **more)  # type: ignore[arg-type]
    return make_plan(*args)


def test_activations_leave_the_ledger_and_take_their_time() -> None:
    wide = with_stores(PAIR, rate=1e12)
    plain, stored = kept(wide, schedule="gpipe"), kept(wide, schedule="gpipe", offload=SAVING)
    for entry in stored.forecast.devices:
        before = plain.forecast.of(entry.device)
        own = [
            s for s in stored.stages.saves if stored.stages.stages[s.stage].device == entry.device
        ]
        assert entry.stored_bytes == 2 * sum(s.nbytes for s in own) > 0
        assert entry.peak_bytes < before.peak_bytes
        assert entry.moved_s == pytest.approx(2 * sum(s.write_s + s.read_s for s in own))
        assert entry.busy_s - before.busy_s == pytest.approx(entry.moved_s)
    assert from_json(to_json(stored), "plan.json") == stored


def test_activations_stay_where_the_target_is_slow_with_a_note() -> None:
    slow = with_stores(PAIR, rate=1.0)
    plain, stored = kept(slow), kept(slow, offload=SAVING)
    assert not stored.stages.saving
    assert stored.forecast.of("d0").peak_bytes == plain.forecast.of("d0").peak_bytes
    each = stored.stages.saves[0]
    said = f"would take {each.write_s + each.read_s:.4f} s a micro-batch, computing takes "
    assert f"stage 0 keeps its activations: moving them {said}" in explain(stored).offload


@pytest.mark.parametrize("target", ["opaque.own", "leaf.part", "aten.rrelu.default"])
def test_a_write_into_saved_activations_is_refused(target: str) -> None:
    with pytest.raises(InputError, match="no stage's activations can lie in a store"):
        kept(with_stores(PAIR), target, offload=SAVING)


def test_autograd_saves_the_noise_of_rrelu_before_it_is_drawn() -> None:
    """So a store has other numbers; where torch saves it later, this ends, and rrelu may go."""
    x = torch.full((64, 64), -1.0, requires_grad=True)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found.append((saved, saved.clone()))
        return found[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[0]):
        F.rrelu(x, training=True)
    assert any(not torch.equal(now, then) for now, then in found)


def test_of_stages_that_run_again_what_they_received_lies_there() -> None:
    wide = with_stores(PAIR, rate=1e12)
    stored = kept(wide, schedule="gpipe", recompute="all", offload=SAVING)
    assert [(each.stage, each.nbytes) for each in stored.stages.saves] == [(1, 16 * MIB)]
    assert stored.forecast.of("d1").stored_bytes == 2 * 16 * MIB
    assert stored.forecast.of("d0").stored_bytes == 0
    assert "offload: what stages received lies in stores" in explain(stored).offload


def test_a_plan_without_stores_is_written_as_it_always_was() -> None:
    text = to_json(planned(PAIR)).decode()
    assert not any(
        word in text for word in ("stores", "offload", "stored_bytes", 'saves":[{"stage', "moved_s")
    )


def test_a_store_that_is_too_small_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(NoPlanError, match="disk-d0 of d0 is too small") as caught:
        planned(with_stores(PAIR, 11 * MIB), offload=STATE)
    assert caught.value.notes[0] == "store disk-d0 of d0 would hold 12.0 MiB and takes 11.0 MiB"
    with pytest.raises(NoPlanError) as caught:
        planned(with_stores(PAIR, 1024), offload=STATE)
    assert "and takes 1.0 KiB" in caught.value.notes[0]


def test_of_a_store_that_is_too_small_the_remedy_is_another_or_none() -> None:
    """It named an optimizer without state, where all fits without --offload."""
    options = Options("naive", micro_batches=2, offload=STATE)
    with pytest.raises(NoPlanError, match="too small") as caught:
        plan_or_remedy(GRAPH, with_stores(PAIR, 1024), Source("model.py"), options)
    assert caught.value.help == "a plan was found with --offload left out"
    need = planned(with_stores(PAIR)).forecast.of("d0").peak_bytes - MIB  # 4 fewer with stores
    memory = int(need * 1.2) + (40 << 20)  # of a process and its tensors
    tight = cluster_of(*(device(name, memory_bytes=memory) for name in ("d0", "d1")))
    with pytest.raises(NoPlanError, match="does not fit") as caught:
        plan_or_remedy(GRAPH, with_stores(tight, 1024), Source("model.py"), options)
    assert 'with more "capacity" for the stores' in str(caught.value.help)


@pytest.mark.parametrize("has_stores", [True, False])
def test_offload_is_the_remedy_where_it_makes_a_plan_fit(has_stores: bool) -> None:
    memory = int(72 * MIB * 1.2) + (40 << 20)
    small = cluster_of(*(device(name, memory_bytes=memory) for name in ("d0", "d1")))
    given = with_stores(small) if has_stores else small
    graph, options = products((MIB,) * 8), Options(micro_batches=4)
    with pytest.raises(NoPlanError, match="needs") as caught:
        plan_or_remedy(graph, given, Source("model.py"), options)
    told = str(caught.value.help)
    assert told.startswith("a plan was found with --offload state")
    assert ("and a store for each device" in told) is not has_stores
