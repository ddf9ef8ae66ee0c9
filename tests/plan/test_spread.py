from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.plan import Plan, spread
from tests.plan.test_explain import hand_made_costs, placed, stack, two

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here


def on(plan: Plan, preset: str) -> Plan:
    """Return a plan of two CPUs as if they were cards."""
    names = ", ".join(f'{{"name": "{n}", "preset": "{preset}"}}' for n in "ab")
    return replace(plan, cluster=parse_cluster(f'{{"devices": [{names}]}}', "x"))


@pytest.fixture
def plan() -> Plan:
    return placed(stack(), "aabbb", two())


def test_an_interval_holds_the_forecast(plan: Plan) -> None:
    found = spread(plan)
    assert found.low_s < plan.forecast.step_s < found.high_s
    assert found.note == ""
    assert str(found).endswith("s in nine of ten")


def test_a_profiled_forecast_has_a_smaller_interval(plan: Plan) -> None:
    wide, narrow = spread(plan), spread(replace(plan, estimator="measured"))
    assert wide.low_s < narrow.low_s
    assert narrow.high_s < wide.high_s


def test_a_card_that_nobody_measured_is_less_sure_and_says_so(plan: Plan) -> None:
    known, unknown = spread(on(plan, "t4")), spread(on(plan, "l40s"))
    assert (known.note, unknown.low_s < known.low_s, unknown.high_s > known.high_s) == (
        *("", True),
        True,
    )
    assert "l40s" in unknown.note


def test_a_rate_of_a_card_that_nobody_measured_is_less_sure_too(plan: Plan) -> None:
    half = replace(plan, graph=replace(plan.graph, autocast="float16"))
    found = spread(on(half, "l4"))
    assert found.note == "no published row of l4 in half precision was forecast before"
    assert spread(on(half, "t4")).note == ""
    assert found.high_s / found.low_s > spread(on(plan, "l4")).high_s / spread(on(plan, "l4")).low_s


def test_replicas_were_measured_on_cpus_with_profiled_ops(plan: Plan) -> None:
    both = replace(plan, stages=replace(plan.stages, micros=((0,), (1,))))
    guessed, profiled = spread(both), spread(replace(both, estimator="measured"))
    assert guessed.note.endswith("were held against measured steps on CPUs with profiled ops only")
    assert guessed.high_s > spread(plan).high_s
    assert profiled.note == ""
    assert profiled.high_s == pytest.approx(1.15 * plan.forecast.step_s)
    assert profiled.low_s == spread(replace(plan, estimator="measured")).low_s
