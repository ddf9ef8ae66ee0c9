"""What is printed of a plan first: fit, speed, limits, and what to try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.cli.verdict import rate_text, verdict
from bigbrain_fx.plan import explain
from tests.plan.test_explain import hand_made_costs, placed, stack, two

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here


def test_speed_comes_first_and_limits_name_their_device() -> None:
    speed, limits, better = verdict(placed(stack(), "aabbb", two()))
    assert speed == "fits 2 devices: 18 s a step, 0.222 rows/s (90 % interval 14.04 to 23.04 s)"
    assert limits.startswith("limits: b is busy 50 % of a step (all devices 42 %); b is fullest, ")
    assert better.startswith("better: --partitioner auto ")


def test_a_faster_neighbour_of_a_cut_is_named_with_its_pin() -> None:
    plan = placed(stack(), "aaaab", two())
    found = explain(plan)
    slower = replace(plan, forecast=replace(plan.forecast, step_s=plan.forecast.step_s * 2))
    *_, better = verdict(slower, replace(found, step_s=found.step_s * 2))
    assert better.startswith("better: --pin ")
    assert "=" in better


@pytest.mark.parametrize(("rate", "text"), [(0.2222, "0.222 rows/s"), (2436.7, "2,437 rows/s")])
def test_a_model_without_tokens_is_counted_in_rows(rate: float, text: str) -> None:
    assert rate_text(stack(), rate) == text
