"""Few unlike devices, divided among replicas otherwise than in the order of the file."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bigbrain_fx.core import Link
from bigbrain_fx.plan import Options
from bigbrain_fx.plan.strategy.bound import Bound
from bigbrain_fx.plan.strategy.space import divisions
from tests.plan.tensor.test_together import SOURCE, cluster, graph, planned, work


def sets_of(speeds: Sequence[float], members: Sequence[int] = (1,), micro: int = 4) -> list[str]:
    options = Options("naive", micro_batches=micro)
    where = cluster(*speeds)
    bound = Bound(work(graph()), where, SOURCE, options)
    found = divisions(where, options, bound, members)
    return list(dict.fromkeys("|".join("".join(own) for own in each.sets) for each in found))


def test_each_kind_of_division_is_there_once() -> None:
    assert set(sets_of((2, 1, 1))) == {"d0|d2", "d1|d2", "d0d1|d2", "d0|d1d2"}
    assert set(sets_of((2, 1, 1), micro=1)) == set()  # a replica has a micro-batch at least
    assert sets_of((1,) * 7) == []  # of many devices nothing


def test_divided_in_equal_sets_of_unlike_devices_there_are_groups_too() -> None:
    both = sets_of((3, 3, 1, 1), members=(2,))
    assert set(both) == {"d0d3|d1d2", "d0d1|d2d3"}  # of d0d2|d1d3 one is planned, and replicated


@pytest.mark.nightly
def test_auto_takes_two_replicas_of_three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fast device, and two slow ones that are as fast together: three do not divide by two."""
    monkeypatch.setattr("bigbrain_fx.plan.apart.CPU", 0.0)
    where = cluster(2, 1, 1, link=Link(1e-7, 1e9))
    plan = planned(work(graph()), where, micro_batches=4, tensor=1, replicas=0)
    said = {each.what: each for each in plan.compared}
    assert said["2 replicas"].step_s is not None
    assert plan.cluster == where
    assert plan.forecast.step_s == min(each.step_s for each in plan.compared if each.step_s)
