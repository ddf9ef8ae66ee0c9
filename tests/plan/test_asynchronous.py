"""Steps that overlap: what is refused, what a step takes in a row, what versions take of memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bigbrain_fx.core import Graph, Link, ParamRef, Ref, Stages
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    explain,
    from_json,
    make_plan,
    replan,
    require_no_overlap,
    to_json,
)
from bigbrain_fx.plan.features import require_pipeline
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.schedule import build
from bigbrain_fx.plan.simulate import in_a_row, simulate
from tests.support.pipelines import FREE, all_of, chain, even_costs
from tests.support.synthetic import cluster_of, device, graph_of, op, weight

MIB = 2**20
SOURCE = Source("model.py")


def products(sizes: Sequence[int], twin: str = "") -> Graph:
    """Return products in a row, each with so many numbers of its own; the last may be a twin."""
    ops = [
        op(f"v{i}", "aten.linear.default", Ref(f"v{i - 1}" if i else "x"), ParamRef(f"w{i}"))
        for i in range(len(sizes))
    ]
    params = [weight(f"w{i}", size) for i, size in enumerate(sizes)]
    params[-1] = replace(params[-1], canonical=twin or params[-1].canonical)
    return graph_of(ops, params, rows=16)


GRAPH = products([MIB] * 8)


def planned(
    count: int, mode: str, graph: Graph = GRAPH, source: Source = SOURCE, **more: object
) -> Plan:
    given = {"partitioner": "naive", "micro_batches": 8, "asynchronous": mode, **more}
    where = cluster_of(*(device(f"d{i}") for i in range(count)))
    return make_plan(graph, where, source, Options(**given))  # type: ignore[arg-type]


# --------------------------------------------------------------------------- time and memory


def period(mode: str, devices: int, micro_batches: int, link: Link = FREE) -> float:
    stages: Stages = replace(chain(devices), asynchronous=mode)  # type: ignore[arg-type]
    costs = replace(even_costs(devices, link), optimizer_s={f"d{i}": 0.5 for i in range(devices)})
    programs = build("1f1b", stages, micro_batches, costs, all_of(stages))
    alone = simulate(programs, stages, costs)
    assert alone.step_s == (micro_batches + devices - 1) * 3 + 0.5
    found = in_a_row(programs, stages, costs, alone)
    for entry in found.devices:
        assert entry.busy_s + entry.idle_s == pytest.approx(found.step_s)
        assert entry.peak_bytes == alone.of(entry.device).peak_bytes
    return found.step_s


def test_equal_stages_have_no_bubble_in_a_row() -> None:
    """Design, section 7: M (f + b), 24 units at p = 4, M = 8; one update, or M of them."""
    assert period("2bw", 4, 8) == 24 + 0.5
    assert period("2bw", 2, 2) == 6 + 0.5
    assert period("stash", 4, 8) == 24 + 8 * 0.5


def test_a_slow_link_takes_its_time_in_a_row_too() -> None:
    assert period("2bw", 2, 8, Link(0.0, float("inf"))) < period_slow()


def period_slow() -> float:
    stages: Stages = replace(chain(2, nbytes=4), asynchronous="2bw")
    costs = even_costs(2, Link(0.0, 1.0))  # four seconds a message, of three that a stage computes
    programs = build("1f1b", stages, 8, costs, all_of(stages))
    found = in_a_row(programs, stages, costs, simulate(programs, stages, costs))
    assert found.step_s >= 8 * 4
    return found.step_s


@pytest.mark.parametrize(("mode", "versions"), [("2bw", (2, 2, 2, 2)), ("stash", (4, 3, 2, 1))])
def test_the_ledger_counts_versions(mode: str, versions: tuple[int, ...]) -> None:
    plan = planned(4, mode)
    alone = make_plan(GRAPH, plan.cluster, SOURCE, Options("naive", micro_batches=8))
    for entry, plain, held in zip(
        plan.forecast.devices, alone.forecast.devices, versions, strict=True
    ):
        more = (held - 1) * plain.weights_bytes
        assert entry.weights_bytes == plain.weights_bytes + more
        assert entry.peak_bytes == plain.peak_bytes + more
    assert mode == "stash" or plan.forecast.step_s < alone.forecast.step_s


def test_versions_that_do_not_fit_are_refused() -> None:
    plan = planned(4, "stash")
    needs = needed_bytes(plan.forecast.devices[0], plan.cluster.devices[0])
    small = cluster_of(*(device(f"d{i}", memory_bytes=needs - 1) for i in range(4)))
    make_plan(GRAPH, small, SOURCE, Options("naive", micro_batches=8))
    with pytest.raises(NoPlanError):
        make_plan(GRAPH, small, SOURCE, Options("naive", micro_batches=8, asynchronous="stash"))


# --------------------------------------------------------------------------- what a plan says


def test_a_plan_says_it_and_one_without_is_written_as_ever() -> None:
    plan = planned(2, "stash")
    assert from_json(to_json(plan), "here") == plan
    assert json.loads(to_json(plan))["stages"]["asynchronous"] == "stash"
    assert "versions: d0 2, d1 1" in str(plan)
    assert "each micro-batch is an update" in str(explain(plan))
    assert replan(plan, plan.cluster).stages.asynchronous == "stash"
    with pytest.raises(InputError, match="resplit does not go with --asynchronous"):
        require_no_overlap(plan, "resplit", "leave it out")
    alone = make_plan(GRAPH, plan.cluster, SOURCE, Options("naive", micro_batches=8))
    assert "asynchronous" not in json.loads(to_json(alone))["stages"]
    assert "asynchronous" not in str(explain(alone))


# --------------------------------------------------------------------------- what is refused


def test_weights_that_two_devices_hold_are_refused() -> None:
    with pytest.raises(InputError, match="'w0', which several devices hold"):
        planned(2, "2bw", products([MIB] * 4, twin="w0"))


def test_every_device_trains_something_and_the_last_has_the_loss() -> None:
    plan = planned(2, "2bw")
    stages = replace(plan.stages, asynchronous=None)
    with pytest.raises(InputError, match="d0 trains nothing"):
        require_pipeline(plan.graph, stages, frozenset({1}), "2bw")
    early = replace(plan.graph, loss=stages.stages[0].ops[-1])
    with pytest.raises(InputError, match="the loss on the last device"):
        require_pipeline(early, stages, frozenset({0, 1}), "2bw")


def test_as_many_micro_batches_as_stages_and_more_than_one_device() -> None:
    with pytest.raises(NoPlanError, match="2 micro-batches and 3 stages") as caught:
        planned(3, "2bw", micro_batches=2)
    assert caught.value.help == "use --micro-batches with one of 4, 8, 16, or fewer devices"
    assert planned(3, "2bw", micro_batches=None).micro_batches >= 3
    with pytest.raises(InputError, match="this plan has one device"):
        planned(1, "2bw")
