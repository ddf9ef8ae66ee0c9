"""What does not fit is refused with the nearest plan that fits, or with fewer rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, DeviceStore, Graph, Link, ParamRef, Ref, Saves
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.fastest import fastest_number
from bigbrain_fx.plan.lightening import require_enough, whole_bytes
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.one import counts, more_counts
from bigbrain_fx.plan.remedy import plan_or_remedy
from tests.support.synthetic import chain_graph, cluster_of, device, graph_of, op, weight

MIB = 2**20


def heavy(rows: int, mib_a_row: int) -> Graph:
    """Return eight ops in a row; each keeps so much of every row for its backward."""
    graph = chain_graph(3, 8, skips=False)
    kept = Saves(own_bytes=f"{mib_a_row * MIB}*B")
    return replace(graph, ops=tuple(replace(op, saves=kept) for op in graph.ops), batch=rows)


@pytest.mark.parametrize(
    ("graph", "devices", "mib", "options", "wanted"),
    [
        (heavy(8, 1), 1, 70, Options(micro_batches=2), "--micro-batches 4"),
        (heavy(4, 1), 2, 56, Options(micro_batches=4, schedule="gpipe"), "--schedule 1f1b"),
        (heavy(1, 16), 2, 108, Options(micro_batches=1), "--activation-checkpointing auto"),
        (
            heavy(1, 16),
            2,
            108,
            Options(micro_batches=1, recompute="all"),
            "one more device like d1",
        ),
        (heavy(1, 16), 1, 90, Options(micro_batches=1), "of memory for every device"),
    ],
)
def test_the_first_change_that_helps_is_told(
    graph: Graph, devices: int, mib: int, options: Options, wanted: str
) -> None:
    each = (device(f"d{i}", memory_bytes=mib * MIB) for i in range(devices))
    with pytest.raises(NoPlanError, match="needs") as caught:
        plan_or_remedy(graph, cluster_of(*each), Source("model.py"), options)
    assert wanted in str(caught.value.help)


@pytest.mark.parametrize("name", ["naive", "m-topo", "scattered"])
def test_the_ledger_of_a_plan_decides_what_fits(name: str) -> None:
    """Devices hold what the finished plan says; a refusal has what each needs, and has."""

    def plan_of(memory_bytes: int) -> Plan:
        each = (device(f"d{i}", memory_bytes=memory_bytes) for i in range(2))
        options = Options(name, micro_batches=4)
        return make_plan(heavy(8, 4), cluster_of(*each), Source("model.py"), options)

    free = plan_of(1 << 40)
    cluster = free.cluster
    enough = max(needed_bytes(e, cluster.device[e.device]) for e in free.forecast.devices)
    tight = plan_of(enough)
    with pytest.raises(NoPlanError, match="does not fit") as caught:
        plan_of(enough - 1)
    assert all(" needs " in note and " and has " in note for note in caught.value.notes)
    if name == "naive":  # the others go by how much devices have
        assert tight.placement.device_of == free.placement.device_of


@pytest.mark.gate("shares0")
@pytest.mark.parametrize("shares", [(1, 1), (4, 1), (2, 1, 2, 1)])
def test_gems_fits_where_the_ledger_of_an_even_cut_fits(shares: Sequence[int]) -> None:
    """Each device holds its opposite's stage, too; chain-dp sees one replica, and at most what."""

    def plan_of(name: str, memory_bytes: int) -> Plan:
        each = (device(f"d{i}", memory_bytes=n * memory_bytes) for i, n in enumerate(shares))
        options = Options(name, micro_batches=4, schedule="gems")
        return make_plan(heavy(8, 4), cluster_of(*each), Source("model.py"), options)

    free = plan_of("naive", 1 << 40)
    cluster = free.cluster
    enough = max(needed_bytes(e, cluster.device[e.device]) for e in free.forecast.devices)
    tight = plan_of("chain-dp", enough)
    for entry in tight.forecast.devices:
        there = tight.cluster.device[entry.device]
        assert needed_bytes(entry, there) <= there.memory_bytes


# --------------------------------------------------------------------------- what no split can hold


def model(layers: int = 4, mib: int = 4) -> Graph:
    """Layers of so many MiB of weights each."""
    read = ["x", *(f"v{i}" for i in range(layers - 1))]
    ops = [
        op(f"v{i}", "aten.mul.Tensor", Ref(value), ParamRef(f"w{i}"))
        for i, value in enumerate(read)
    ]
    return graph_of(ops, [weight(f"w{i}", mib * MIB // 4) for i in range(layers)])


def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note what is estimated, without which nothing is planned."""
    found: list[object] = []

    def never(*about: Any) -> Any:
        found.append(about)
        raise AssertionError("it is planned")

    monkeypatch.setattr("bigbrain_fx.plan.one._estimated", never)
    return found


@pytest.mark.parametrize(
    "options",
    [
        Options("naive"),
        Options("chain-dp"),
        Options("auto", replicas=0),
        Options("chain-dp", replicas=2, zero_stage=3, sum_order="micro"),
        Options("chain-dp", tensor=2),
        Options("chain-dp", recompute="all"),
    ],
)
def test_a_model_over_all_memory_is_refused_before_planning(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = planned(monkeypatch)
    cluster = cluster_of(*(device(f"d{i}", memory_bytes=60 * MIB) for i in range(2)))
    with pytest.raises(NoPlanError) as caught:
        make_plan(model(), cluster, Source("m.py"), options)
    assert not tried
    assert any(note.startswith("d0 has 60.0 MiB") for note in caught.value.notes)


def test_gradients_and_state_count_once_each() -> None:
    graph = model(1, 4)
    assert whole_bytes(graph, Source("m.py")) == {"w0": 16 * MIB}
    assert whole_bytes(graph, Source("m.py", optimizer_state=0.0)) == {"w0": 8 * MIB}
    assert whole_bytes(graph, Source("m.py"), ("state",)) == {"w0": 8 * MIB}
    assert whole_bytes(replace(graph, training=False), Source("m.py")) == {"w0": 4 * MIB}


def test_a_device_without_room_counts_as_none() -> None:
    """64 MiB are needed; one device holds 50, the other less than its process takes."""
    cluster = cluster_of(device("d0", memory_bytes=100 * MIB), device("d1", memory_bytes=MIB))
    with pytest.raises(NoPlanError) as caught:
        require_enough(model(), cluster, Source("m.py"), ())
    assert "they have 50.0 MiB" in caught.value.what


def test_offloaded_tensors_need_no_memory() -> None:
    devices = [device(f"d{i}", memory_bytes=80 * MIB) for i in range(2)]
    stores = tuple(DeviceStore(f"s{i}", f"d{i}", 1 << 34, 1e9) for i in range(2))
    cluster = replace(cluster_of(*devices), stores=stores)
    plan = make_plan(model(), cluster, Source("m.py"), Options(offload=("state",)))
    assert plan.stages.offload == ("state",)
    require_enough(model(64), cluster, Source("m.py"), ("weights",))


# --------------------------------------------------------------------------- rows of a micro-batch


ROWS = 256


def wide(rows: int = ROWS) -> Graph:
    """Four layers whose activations take 1 MiB a row: all rows of a step take 256 MiB each."""
    graph = chain_graph(1, 4, skips=False)
    ops = tuple(
        replace(
            op,
            outputs=(replace(op.outputs[0], shape=("B", 1 << 18)),),
            flops=f"{1 << 20}*B",
            writes_bytes=f"{1 << 20}*B",
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, batch=rows)


def one_device(memory_bytes: int, count: int = 1) -> Cluster:
    devices = (device(f"d{i}", 100, memory_bytes) for i in range(count))
    return cluster_of(*devices, link=Link(1e-5, 1e12))


def test_further_numbers_have_half_the_rows_each() -> None:
    graph, options = wide(48), Options()
    assert counts(graph, one_device(1, 3), options) == [1, 2, 3, 4, 6, 8, 12]
    assert list(more_counts(graph, options, 12)) == [24, 48]
    assert list(more_counts(replace(graph, batch=45), options, 9)) == [45]
    assert list(more_counts(graph, replace(options, micro_batches=12), 12)) == []
    assert list(more_counts(replace(graph, static_batch=4), options, 12)) == []


@pytest.mark.parametrize("partitioner", ["naive", "chain-dp", "auto"])
def test_a_batch_of_many_rows_fits_with_few_rows_a_micro_batch(partitioner: str) -> None:
    options = Options(partitioner, tensor=1)
    plan = make_plan(wide(), one_device(100 * MIB), Source("m.py"), options)
    assert plan.rows < ROWS // 8
    assert plan.micro_batches * plan.rows == ROWS
    asked = replace(options, micro_batches=8)
    with pytest.raises(NoPlanError):
        make_plan(wide(), one_device(100 * MIB), Source("m.py"), asked)


@pytest.mark.parametrize("partitioner", ["chain-dp", "auto"])
def test_replicas_have_as_few_rows(partitioner: str) -> None:
    options = Options(partitioner, replicas=2, tensor=1)
    plan = make_plan(wide(), one_device(100 * MIB, 2), Source("m.py"), options)
    assert plan.stages.replicas == 2
    assert plan.rows < ROWS // 8


@pytest.mark.gate("options1")
@pytest.mark.parametrize("options", [Options("chain-dp"), Options("auto", sum_order="backend")])
def test_a_number_of_replicas_that_divides_no_batch_goes(options: Options) -> None:
    """14 replicas share 1,024 rows, which no number of equal shares does."""
    devices = one_device(100 * MIB, 14)
    plan = make_plan(wide(1024), devices, Source("m.py"), replace(options, replicas=14, tensor=1))
    each = [len(replica.micros) for replica in plan.placement.replicas]
    assert sum(each) * plan.rows == 1024
    assert len(each) == 14
    assert max(each) - min(each) <= 1
    shares = replace(options, replica_shares=(1,) * 14, tensor=1)
    with pytest.raises(InputError) as caught:
        make_plan(wide(1024), devices, Source("m.py"), shares)
    assert "--replicas 14" in (caught.value.help or "")


def test_no_further_number_is_tried_but_where_the_last_is_best() -> None:
    plan = make_plan(wide(8), one_device(1 << 34), Source("m.py"), Options(micro_batches=1))
    steps_s = {1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5, 16: 0.1}
    tried = []

    def make(count: int) -> object:
        tried.append(count)
        forecast = replace(plan.forecast, step_s=steps_s[count])
        return replace(plan, micro_batches=count, forecast=forecast)

    best = fastest_number([1, 2], [4, 8, 16], make, but=(NoPlanError,))  # type: ignore[arg-type]
    assert (best.micro_batches, tried) == (4, [1, 2, 4, 8])
    tried.clear()
    best = fastest_number([4, 8], [16], make, but=(NoPlanError,))  # type: ignore[arg-type]
    assert (best.micro_batches, tried) == (4, [4, 8])
