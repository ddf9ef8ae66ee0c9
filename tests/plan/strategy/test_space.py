"""The space of strategies: unlike devices of a replica, and rows of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.plan.fastest import simplest
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.nouns import Case
from bigbrain_fx.plan.search import search
from bigbrain_fx.plan.strategy import space
from bigbrain_fx.plan.strategy.strategy import Bound, Priced, Strategy
from tests.plan.tensor.test_together import cluster, graph, planned, work
from tests.plan.test_remedy import MIB, one_device, wide
from tests.support.synthetic import cluster_of, device
from tools.bench.auto import stacked


@pytest.mark.nightly
def test_auto_takes_two_replicas_of_three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fast device, and two slow ones that are as fast together: three do not divide by two."""
    monkeypatch.setattr("bigbrain_fx.plan.fastest.CPU", 0.0)
    where = cluster(2, 1, 1, link=Link(1e-7, 1e9))
    plan = planned(work(graph()), where, micro_batches=4, tensor=1, replicas=0)
    said = {each.what: each for each in plan.compared}
    assert said["2 replicas"].step_s is not None
    assert plan.cluster == where
    assert plan.forecast.step_s == min(each.step_s for each in plan.compared if each.step_s)


def far(where: Cluster, *names: str) -> Cluster:
    """Give devices a slow link to all others."""
    slow = Link(1e-3, 1e4)
    pairs = tuple((a, b, slow) for a in names for b in where.device if b not in names)
    return replace(where, links=pairs)


def test_auto_leaves_out_a_device_behind_a_slow_link() -> None:
    where = far(cluster(2, 2, 1), "d2")
    plan = planned(work(graph()), where, micro_batches=4, tensor=1, replicas=0)
    assert set(plan.stages.devices) <= {"d0", "d1"}
    assert plan.stages.replicas == 2
    assert plan.cluster == where


def test_of_equal_plans_the_one_that_combines_fewer_ways_is_taken() -> None:
    """Four replicas of one device are one way; two replicas of pipelines are two."""
    found, where = work(graph()), cluster(1, 1, 1, 1)
    plans = [planned(found, where, micro_batches=4, tensor=1, replicas=n) for n in (2, 4)]
    assert simplest(plans, 1e9) is plans[1]


# --------------------------------------------------------------------------- rows of micro-batches


def planned_rows(
    steps: Mapping[int, float | None],
    about: Mapping[int, float],
    no: Sequence[int] = (),
) -> tuple[list[int | None], int]:
    """Return the numbers that are planned, and the best, of what each would take; None: no plan."""
    asked: list[int | None] = []

    def make(number: int | None) -> Any:
        asked.append(number)
        step_s = steps[number or 0]
        if step_s is None:
            raise NoPlanError("too large", code="BX1244")
        forecast, stages = SimpleNamespace(step_s=step_s), SimpleNamespace(deferring=())
        return SimpleNamespace(forecast=forecast, stages=stages, number=number)

    priced = [
        Priced(Strategy(2, micro_batches=n), 0.5, about[n], fits=True, lacks=n in no) for n in steps
    ]
    plan: Any = space.fastest_number(priced, make, lambda _: True)
    return asked, plan.number


def test_neighbours_are_planned_while_they_are_faster() -> None:
    steps = {2: 9.0, 4: 4.0, 8: 3.0, 16: 2.0, 32: 2.5, 64: 1.0}
    assert planned_rows(steps, {**dict.fromkeys(steps, 5.0), 8: 1.0}) == ([8, 16, 32, 4], 16)


def test_fewer_rows_are_planned_until_some_fit() -> None:
    steps = {2: None, 4: None, 8: None, 16: 2.0, 32: 1.0}
    about = dict.fromkeys(steps, 5.0)
    assert planned_rows(steps, about) == ([2, 4, 8, 16, 32], 32)
    assert planned_rows(steps, about, no=(2, 4)) == ([8, 16, 32], 32)
    with pytest.raises(NoPlanError):
        planned_rows(dict.fromkeys((2, 4)), about)


@pytest.mark.parametrize("graph", [wide(64), replace(stacked(2), batch=64)])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_nothing_lacks_memory_by_the_bound_that_fits_by_the_ledger(graph: Graph, rows: int) -> None:
    options = Options("naive", micro_batches=graph.batch // rows, replicas=2)
    roomy = one_device(1 << 42, 2)
    plan = make_plan(graph, roomy, Source(""), options)
    most = max(needed_bytes(e, roomy.device[e.device]) for e in plan.forecast.devices)
    for share, lacks in ((1.0, False), (0.3, True)):
        small = cluster_of(*(device(f"d{i}", 100, int(share * most)) for i in range(2)))
        bound = Bound(Case(graph, small, Source(""), replace(options, micro_batches=None)))
        found = bound.of(Strategy(2, micro_batches=graph.batch // rows))
        assert found.lacks is lacks


def test_rows_that_lack_memory_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take 1 MiB in each of four layers, and a device has 100 MiB."""
    asked: list[int] = []

    def counted(ask: Any) -> Any:
        asked.extend(ask.micro_batches)
        return search(ask)

    monkeypatch.setattr("bigbrain_fx.plan.judge.search", counted)
    options = Options("auto", replicas=2, tensor=1)
    plan = make_plan(wide(), one_device(100 * MIB, 2), Source(""), options)
    assert plan.stages.replicas == 2
    assert min(asked) >= 4  # with fewer, a replica's rows take more than its device has
