"""Split backwards that nobody asked for: where they are tried, and when they are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Cluster, Graph, Link, Placement
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, fastest, make_plan
from bigbrain_fx.plan.fastest import HALVES, open_halves
from bigbrain_fx.plan.search.candidates import Scored
from bigbrain_fx.plan.search.nouns import Score, Trial
from bigbrain_fx.plan.search.pipeline_search import halved
from tests.support.search_cases import SOURCE, auto, equal, even_chain

FAST = Link(1e-3, 1e10)


class Layers(nn.Module):
    """Linear layers in a row, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Layers(), (torch.zeros(16, 32, 128),)).graph


@pytest.mark.nightly
def test_idle_devices_are_filled_unasked(graph: Graph) -> None:
    """Of a chain in three parts a third of 1F1B is idle; a split backward fills most of that."""
    cluster = equal(3, FAST)
    plan = auto(graph, cluster, micro_batches=4)
    whole = auto(graph, cluster, micro_batches=4, defer=())
    assert whole.schedule == "1f1b"
    assert plan.schedule in HALVES
    assert plan.stages.deferring
    assert plan.forecast.step_s < 0.95 * whole.forecast.step_s
    assert plan.search is not None
    assert plan.search.winner.schedule == plan.schedule


@pytest.mark.nightly
def test_backwards_stay_whole_without_weights_to_delay() -> None:
    """Ops without parameters have no second half, whatever the order is called."""
    plan = auto(even_chain(12, rows=8), equal(2, FAST), micro_batches=8)
    assert not plan.stages.deferring


@pytest.mark.parametrize(
    "choice",
    [
        {"schedule": "1f1b"},
        {"in_flight": (2, 1)},
        {"defer": ()},
        {"objective": "memory"},
        {"zero_stage": 3},
    ],
)
def test_none_are_tried_where_something_else_was_asked_for(
    graph: Graph, choice: dict[str, object]
) -> None:
    cluster = equal(2, FAST)
    options = Options("auto", **choice)  # type: ignore[arg-type]
    assert open_halves(graph, cluster, options) == {}
    assert open_halves(graph, cluster, Options("auto")) == HALVES


def test_none_are_tried_where_they_were_never_run(graph: Graph) -> None:
    cluster = equal(2, FAST)
    card = replace(cluster, devices=tuple(replace(d, kind="cuda") for d in cluster.devices))
    assert open_halves(graph, card, Options("auto")) == {}
    assert open_halves(graph, equal(33, FAST), Options("auto")) == {}
    assert open_halves(replace(graph, training=False), cluster, Options("auto")) == {}
    assert "zb-v" not in open_halves(graph, cluster, Options("auto", cut_at="blocks"))


@pytest.mark.nightly
def test_replicas_are_of_one_schedule(graph: Graph) -> None:
    cluster = equal(6, FAST)
    plan = make_plan(graph, cluster, SOURCE, Options("auto", replicas=2, tensor=1))
    whole = make_plan(graph, cluster, SOURCE, Options("auto", replicas=2, tensor=1, defer=()))
    assert plan.schedule in HALVES
    assert whole.schedule == "1f1b"
    assert plan.forecast.step_s < 0.95 * whole.forecast.step_s


@pytest.mark.nightly
def test_with_zero_3_replicas_keep_whole_backwards(graph: Graph) -> None:
    options = Options("auto", replicas=2, tensor=1, zero_stage=3, sum_order="micro")
    plan: Plan = make_plan(graph, equal(4, FAST), SOURCE, options)
    assert plan.schedule not in HALVES
    assert not plan.stages.deferring


def test_few_lines_of_each_number_of_micro_batches() -> None:
    scored = [
        _scored(("d0", "d1"), 4, 1.0),
        _scored(("d0", "d1"), 4, 1.01),  # the same line, another cut
        _scored(("d1", "d0"), 4, 1.02),
        _scored(("d0", "d2"), 4, 1.03),
        _scored(("d0", "d1"), 8, 1.04, is_chain=False),
        _scored(("d0",), 8, 1.05),
        _scored(("d1", "d0"), 8, 2.0),  # too far away
    ]
    found = [
        (trial.micro_batches, trial.partitioner, trial.schedule)
        for trial in halved(scored, HALVES, most=2)
    ]
    assert found == [
        *((4, "d0-d1", name) for name in HALVES),
        *((4, "d1-d0", name) for name in HALVES),
        (8, "d0-d1", "auto"),
    ]


def _scored(
    devices: tuple[str, ...], micro: int, step_s: float, *, is_chain: bool = True
) -> Scored:
    trial = Trial("-".join(devices), Placement({"a": devices[0]}), "1f1b", micro, (2, 1))
    return Scored(trial, Score(step_s, devices, (1,) * len(devices), 0.1, is_chain))


@pytest.mark.nightly
def test_a_split_backward_counts_more_than_its_forecast(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, such plans gained less than their forecast said; one of 5 % is not taken."""
    cluster = equal(3, FAST)
    gain = 1 - _step_s(graph, cluster) / _step_s(graph, cluster, defer=())
    monkeypatch.setattr(fastest, "SPLIT", 1 / (1 - gain) + 0.01)
    plan = auto(graph, cluster, micro_batches=4)
    assert plan.schedule == "1f1b"
    assert plan.search is not None
    assert any("the best is simpler" in other.why for other in plan.search.others)


def _step_s(graph: Graph, cluster: Cluster, **choices: object) -> float:
    return auto(graph, cluster, micro_batches=4, **choices).forecast.step_s
