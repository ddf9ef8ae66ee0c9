"""What does not fit is refused with the nearest change with which the planner found a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Graph, Saves
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Source
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
        (heavy(1, 16), 2, 108, Options(micro_batches=1), "one more device like d1"),
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
