"""What no split can hold is refused before anything is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import DeviceStore, Graph, ParamRef, Ref
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.plan.lightening import require_enough, whole_bytes
from tests.support.synthetic import cluster_of, device, graph_of, op, weight

MIB = 2**20


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
