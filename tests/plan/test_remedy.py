"""What does not fit is refused with the nearest change with which the planner found a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bigbrain_fx.core import Graph, Saves
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.remedy import plan_or_remedy
from tests.support.synthetic import chain_graph, cluster_of, device

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
