"""--cut-at: whether cuts may go through a layer of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Graph, ModuleCall
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.planning import Given
from tests.support import samples
from tests.support.synthetic import chain_graph


def of_layers(count: int, each: int) -> Graph:
    """Draw layers in a row, of a few ops each."""
    graph = chain_graph(3, count * each, skips=False)
    ops = (
        replace(op, modules=(ModuleCall(f"blocks.{i // each}", "Block"),))
        for i, op in enumerate(graph.ops)
    )
    return replace(graph, ops=tuple(ops))


GRAPH = of_layers(3, 4)  # two devices would have a layer and a half each


def plan_of(partitioner: Given, **choices: object) -> Plan:
    options = replace(Options(partitioner, micro_batches=4), **choices)  # type: ignore[arg-type]  # by name
    return make_plan(GRAPH, samples.cluster(2), Source("model.py"), options)


def cut_layers(plan: Plan) -> list[int]:
    home = plan.placement.device_of
    names = [op.name for op in plan.graph.ops]
    return [i for i in range(3) if len({home[name] for name in names[4 * i : 4 * i + 4]}) > 1]


@pytest.mark.gate("chain-dp")
@pytest.mark.parametrize("partitioner", ["chain-dp", "auto"])
def test_blocks_stay_whole_whatever_that_costs(partitioner: str) -> None:
    whole = plan_of(partitioner, cut_at="blocks")
    anywhere = plan_of(partitioner, cut_at="anywhere")
    assert cut_layers(whole) == []
    assert cut_layers(anywhere) != []  # or the cases say nothing
    assert anywhere.forecast.step_s < whole.forecast.step_s


def test_the_default_cuts_inside_a_layer_where_that_gains_more_than_forecasts_are_off() -> None:
    whole, anywhere = (
        plan_of("chain-dp", cut_at=at).forecast.step_s for at in ("blocks", "anywhere")
    )
    found = plan_of("chain-dp")
    assert bool(cut_layers(found)) == (whole > 1.04 * anywhere)


def test_bounds_say_that_no_layer_was_cut() -> None:
    search = plan_of("auto", cut_at="blocks").search
    assert search is not None
    assert "that cuts no layer" in search.bounds[0].covers
