"""What is known of strategies before they are planned; many devices, of which few are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, Source, make_plan, telling
from bigbrain_fx.plan.nouns import Case
from bigbrain_fx.plan.one import placed
from bigbrain_fx.plan.replicas import numbers
from bigbrain_fx.plan.search import Ask, Search, Trial, search
from bigbrain_fx.plan.strategy.space import undivided
from bigbrain_fx.plan.strategy.strategy import Bound, Priced, Strategy
from bigbrain_fx.planning.device_kinds import MOST_DEVICES
from tests.plan.strategy.test_asked_for import drawn
from tests.plan.tensor.test_together import cluster as unlike, graph as layers, work
from tests.support.synthetic import GIB, device
from tools.bench.auto import stacked

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
    where = cluster(35)
    plan = planned(where, graph(2, batch=35))
    assert plan.compared[0].why == "chosen"
    assert {each.what for each in plan.compared} >= {"one pipeline", "35 replicas"}
    left = [each for each in plan.compared if each.step_s is None]
    assert left
    assert all("closed form" in each.why or "at the least" in each.why for each in left)


def priced(where: Cluster, found: Graph, **choices: Any) -> list[Priced]:
    options = Options(**{"partitioner": "auto", "tensor": 1, "replicas": 0, **choices})
    return [Bound(Case(found, where, SOURCE, options)).of(s) for s in undivided(where, options)]


def test_weights_and_state_tell_a_lack_of_memory() -> None:
    found = graph(8)
    held = sum(param.spec.nbytes for param in found.params)
    where = cluster(64, memory_bytes=int(1.2 * 5.5 * held / 8) + (40 << 20))
    fits = {each.strategy.replicas: each.fits for each in priced(where, found)}
    assert list(fits.values()) == sorted(fits.values(), reverse=True)  # each has fewer devices
    assert fits[1]
    assert not fits[64]
    divided = {e.strategy.replicas: e.fits for e in priced(where, found, zero_stage=1)}
    assert sum(divided.values()) > sum(fits.values())


def test_the_closed_form_takes_many_replicas_only_where_sums_are_soon_sent() -> None:
    """By hand: 64 replicas send nearly all weights there and back; so few stages send none."""
    found = graph()
    held = sum(param.spec.nbytes for param in found.params)
    about_s = {}
    for rate in (1e6, 1e15):
        every = priced(cluster(64, link=Link(0, rate)), found)
        about_s[rate] = {each.strategy.replicas: each.about_s for each in every}
    for count in numbers(cluster(64)):
        sums_s = 2 * (count - 1) / count * held / (64 // count) / 1e6
        assert about_s[1e6][count] - about_s[1e15][count] == pytest.approx(sums_s, rel=1e-3)


def test_the_least_is_of_micro_batches_dealt_whole() -> None:
    options = Options("naive", micro_batches=4)
    where = unlike(2, 1, 1, link=Link(1e-9, 1e12))
    bound = Bound(Case(work(layers()), where, SOURCE, options))
    even, uneven = (
        bound.of(Strategy(2, sets=(("d0",), others))).least_s for others in (("d1", "d2"), ("d2",))
    )
    assert uneven / even == pytest.approx(1.5, rel=0.01)  # 3:1 at speeds 2:1, for 2:2 at 2:2


@pytest.mark.gate("2")
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_faster_than_the_least(seed: int) -> None:
    found, where = drawn(seed)
    options = Options("auto", tensor=1, replicas=0, effort="fast")
    bound = Bound(Case(found, where, SOURCE, options))
    for strategy in undivided(where, options):
        plan = make_plan(found, where, SOURCE, strategy.asked(options))
        assert bound.of(strategy).least_s <= plan.forecast.step_s * (1 + 1e-9)


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


def test_too_many_replicas_for_a_list_of_messages_are_refused() -> None:
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
    made: list[object] = []
    searched: list[Ask] = []
    pressed_in: list[int] = []

    def impatient(*args: Any, **more: Any) -> Any:
        made.append(args)
        if len(made) == 3:
            pressed_in.append(len(searched))
            raise KeyboardInterrupt
        return placed(*args, **more)

    monkeypatch.setattr("bigbrain_fx.plan.judge.placed", impatient)

    def counted(ask: Ask) -> tuple[Trial, Search]:
        searched.append(ask)
        return search(ask)

    monkeypatch.setattr("bigbrain_fx.plan.judge.search", counted)
    plan = planned(cluster(48), replicas=replicas, effort="normal")
    assert plan.stages.replicas >= 1
    assert pressed_in == [len(searched)]
