"""Who waits for a plan is told how far it is; who does not listen changes nothing."""

from __future__ import annotations

import pytest

from bigbrain_fx.core import Link
from bigbrain_fx.plan import Options, Source, make_plan, telling
from tests.support.synthetic import chain_graph, cluster_of, device

CLUSTER = cluster_of(device("d0"), device("d1"), link=Link(1e-4, 1e9))


@pytest.mark.nightly
def test_a_search_tells_how_many_plans_it_has_simulated() -> None:
    graph, said = chain_graph(0, 8), list[str]()
    options = Options("auto", "analytical", effort="fast")
    with telling(said.append):
        found = make_plan(graph, CLUSTER, Source("model.py"), options)
    assert found.search is not None
    assert said[0] == "one pipeline"
    assert said[-1].startswith(f"{found.search.simulated} plans simulated, the fastest ")
    assert make_plan(graph, CLUSTER, Source("model.py"), options).placement == found.placement
    assert len(said) == found.search.simulated + 1, "it listens no longer"


def test_each_number_of_micro_batches_is_told() -> None:
    graph, said = chain_graph(0, 4), list[str]()
    with telling(said.append):
        make_plan(graph, CLUSTER, Source("model.py"), Options("naive", "analytical"))
    assert said == ["naive, 1 micro-batch", "naive, 2 micro-batches", "naive, 4 micro-batches"]
