"""Many devices: which replicas and groups are planned, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, Source, make_plan, telling
from bigbrain_fx.plan.levels import levels, open_numbers
from bigbrain_fx.plan.one import placed
from bigbrain_fx.plan.replicas import MOST_TRIED, numbers
from bigbrain_fx.plan.search import Ask, Search, Trial, search
from bigbrain_fx.planning.many_devices import MOST_DEVICES
from tests.support.synthetic import GIB, device
from tools.bench_auto import stacked

SOURCE = Source("model.py")


USUAL = Link(1e-5, 1e9)


def cluster(count: int, memory_bytes: int = GIB, link: Link = USUAL) -> Cluster:
    return Cluster(tuple(device(f"d{i}", 1, memory_bytes) for i in range(count)), link)


def graph(blocks: int = 2, batch: int = 64) -> Graph:
    return replace(stacked(blocks), batch=batch)


def planned(where: Cluster, found: Graph | None = None, **choices: Any) -> Plan:
    given = {"partitioner": "auto", "effort": "fast", "tensor": 1, "replicas": 0, **choices}
    return make_plan(found or graph(), where, SOURCE, Options(**given))


@pytest.mark.nightly
def test_one_that_the_closed_form_puts_first_is_planned_and_all_others_are_named() -> None:
    where = cluster(MOST_TRIED + 3)
    plan = planned(where, graph(1, batch=35))
    assert plan.compared[0].why == "chosen"
    assert {each.what for each in plan.compared} >= {"one pipeline", "35 replicas"}
    left = [each for each in plan.compared if each.step_s is None]
    assert left
    assert all("closed form" in each.why for each in left)


def test_what_lacks_memory_comes_last_and_shares_of_the_state_are_taken_where_they_help() -> None:
    found, options = graph(8), Options("auto", tensor=1, replicas=0)
    held = sum(param.spec.nbytes for param in found.params)
    where = cluster(64, memory_bytes=int(1.2 * 5.5 * held / 8) + (40 << 20))
    ranked = levels(found, where, SOURCE, options, *open_numbers(where, options))
    assert [each.fits for each in ranked] == sorted((e.fits for e in ranked), reverse=True)
    zero = {each.options.replicas or 1: each.options.zero_stage for each in ranked if each.fits}
    assert zero[1] == 0  # there is nobody to share with
    assert 1 in zero.values()
    assert max(zero) < 64


def test_the_closed_form_takes_many_replicas_only_where_sums_are_soon_sent() -> None:
    """By hand: 64 replicas send nearly all weights there and back; so few stages send none."""
    options, found = Options("auto", tensor=1, replicas=0), graph()
    held = sum(param.spec.nbytes for param in found.params)
    about_s = {}
    for rate in (1e6, 1e15):
        where = cluster(64, link=Link(0, rate))
        each = levels(found, where, SOURCE, options, *open_numbers(where, options))
        about_s[rate] = {level.options.replicas: level.about_s for level in each}
    for count in numbers(where):
        sums_s = 2 * (count - 1) / count * held / (64 // count) / 1e6
        assert about_s[1e6][count] - about_s[1e15][count] == pytest.approx(sums_s, rel=1e-3)


@pytest.mark.nightly
def test_alike_replicas_of_many_devices_run_what_one_does() -> None:
    plan = planned(cluster(48), replicas=8)
    assert plan.stages.replicas == 8
    first = [stage.ops for stage in plan.stages.of_replica(0)]
    assert all([s.ops for s in plan.stages.of_replica(r)] == first for r in range(8))
    assert plan.micro_batches % 8 == 0
    assert (
        len({plan.stages.micros_of(s.index, plan.micro_batches) for s in plan.stages.stages}) == 8
    )


def test_so_many_replicas_that_no_plan_lists_their_messages_are_refused() -> None:
    with pytest.raises(InputError, match=r"1,024 replicas .* 16,760,832 messages") as caught:
        planned(cluster(1024), graph(1, batch=1024), replicas=1024)
    assert "at most --replicas 354" in str(caught.value)


@pytest.mark.nightly
def test_more_devices_than_a_search_looks_at_are_answered_by_a_pipeline_on_some() -> None:
    where = cluster(MOST_DEVICES + 1)
    said: list[str] = []
    with telling(said.append):
        plan = planned(where, graph(1), replicas=None)
    assert plan.stages.replicas == 1
    assert plan.search is not None
    assert "on 1,024 of 1,025 devices" in plan.search.bounds[0].covers
    assert said


@pytest.mark.gate("0")
@pytest.mark.parametrize("replicas", [0, 8])
def test_ctrl_c_in_one_replicas_search_ends_all_searches(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressed in the search of one replica: all are planned as it was found, and nothing else."""
    made = []

    def impatient(*args: Any, **more: Any) -> Any:
        made.append(args)
        if len(made) == 3:
            raise KeyboardInterrupt
        return placed(*args, **more)

    monkeypatch.setattr("bigbrain_fx.plan.judge.placed", impatient)
    searched = []

    def counted(ask: Ask) -> tuple[Trial, Search]:
        searched.append(ask)
        return search(ask)

    monkeypatch.setattr("bigbrain_fx.plan.judge.search", counted)
    plan = planned(cluster(48), replicas=replicas, effort="normal")
    assert plan.stages.replicas >= 1
    assert len(searched) == 1
