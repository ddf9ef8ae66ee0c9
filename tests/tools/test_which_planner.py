"""The table of planners: rows of one small scenario, the document, and deep graphs by stacking."""

from __future__ import annotations

import pytest

from bigbrain_fx.core import Graph, ModuleCall, Ref
from bigbrain_fx.errors import InputError
from tests.support.synthetic import graph_of, op
from tools.planner_scenarios import (
    MICRO_BATCHES,
    Scenario,
    branchy,
    chain,
    cluster_of,
    synthetic,
    tight,
)
from tools.stacked_graph import stacked
from tools.time_planners import measure
from tools.which_planner import Judged, Row, document, rows_of, table

PLANNERS = ("naive", "chain-dp", "mcmc+unaided", "cp-sat-of-nobody")


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    cluster = cluster_of("unlike", "1 Gbit/s")
    return Scenario("chain, unlike, seed 0", "chain, unlike", chain(0, 8), cluster, MICRO_BATCHES)


@pytest.fixture(scope="module")
def rows(scenario: Scenario) -> list[Row]:
    return rows_of(scenario, PLANNERS, Judged(), "fast")


def test_every_planner_has_a_row_and_the_best_is_one(rows: list[Row]) -> None:
    assert [row.partitioner for row in rows] == list(PLANNERS)
    ratios = [row.ratio for row in rows[:3]]
    assert min(ratio for ratio in ratios if ratio is not None) == 1.0
    assert rows[1].step_s is not None
    assert rows[0].step_s is not None
    assert rows[1].step_s < rows[0].step_s  # unlike devices: equal shares are slower
    assert rows[3].step_s is None
    assert "cp-sat-of-nobody" in rows[3].note


def test_the_document_has_the_table_and_what_it_says(rows: list[Row]) -> None:
    text = document(rows, "a command", measured=False)
    assert "| | chain, unlike |" in text
    assert "Written by `a command`" in text
    assert "**chain, unlike**: best " in text
    assert "`naive` " in text.rpartition("slower:")[2]
    assert not any("cp-sat-of-nobody" in line for line in table(rows))
    assert "Not here: " in text


def test_scenarios_are_drawn_by_a_rule() -> None:
    assert chain(1, 6) == chain(1, 6)
    assert branchy(1, 3) == branchy(1, 3)
    assert branchy(1, 3) != branchy(2, 3)
    families = [each.family for each in synthetic(1)]
    assert len(set(families)) == len(families) == 6


def test_tight_memory_is_less_and_equal(scenario: Scenario) -> None:
    found = tight(scenario)
    (room,) = {device.memory_bytes for device in found.cluster.devices}
    assert room < scenario.cluster.devices[0].memory_bytes
    assert found.family == "chain, unlike, tight memory"


def blocks(count: int) -> Graph:
    """Make blocks of two ops; each reads what the block before it made, and a value of none."""
    ops = [op("start", "aten.relu.default", Ref("x"))]
    for i in range(count):
        inside = (ModuleCall(f"blocks.{i}", "Block"),)
        ops.append(op(f"a{i}", "aten.relu.default", Ref(ops[-1].name), modules=inside))
        args = (Ref(ops[-1].name), Ref("start"))
        ops.append(op(f"b{i}", "aten.add.Tensor", *args, modules=inside))
    ops.append(op("loss", "aten.sum.default", Ref(ops[-1].name)))
    return graph_of(ops)


def test_stacked_blocks_feed_each_other() -> None:
    found = stacked(blocks(3), 12)
    assert len(found.ops) == 12  # 8, and block 1 twice more
    names = [each.name for each in found.ops]
    assert names[3:9] == ["a1", "b1", "a1_1000", "b1_1000", "a1_1001", "b1_1001"]
    assert found.op["a1_1000"].refs == ("b1",)
    assert found.op["b1_1001"].refs == ("a1_1001", "start")
    assert found.op["a1_1001"].module_path == "blocks.1001"
    assert found.op["a2"].refs == ("b1_1001",)


def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="takes 0 values"):
        stacked(blocks(3), 12, name="layers")


def test_planning_is_timed_and_refusals_are_rows(scenario: Scenario) -> None:
    row = measure(scenario.graph, "chain-dp", "fast", 1e-9)
    assert row.feasible
    assert row.value is not None
    assert row.gap == pytest.approx(row.value / 1e-9 - 1)
    row = measure(stacked(blocks(3), 30), "chain-dp", "fast", None)
    assert not row.feasible
    assert "micro-batches" in row.note
