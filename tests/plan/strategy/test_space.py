"""Few unlike devices, of which some are a replica together."""

from __future__ import annotations

import pytest

from bigbrain_fx.core import Link
from tests.plan.tensor.test_together import cluster, graph, planned, work


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
