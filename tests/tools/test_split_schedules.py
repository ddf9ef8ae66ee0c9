"""Schedules held to 1F1B: in the same round, and how far the simulator is off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from bigbrain_fx.plan import Plan
from tools.split_schedules import SCHEDULES, rows_of


@dataclass
class _Forecast:
    step_s: float


@dataclass
class _Planned:
    forecast: _Forecast


def test_each_round_is_held_to_1f1b_of_that_round() -> None:
    plans = [cast("Plan", _Planned(_Forecast(step_s))) for step_s in (2.0, 1.8, 1.7)]
    taken = [(2.0, 4.0, 3.0), (1.9, 3.8, 2.85), (1.6, 3.2, 2.4)]
    rows = rows_of(plans, taken)
    assert [row.schedule for row in rows] == [*SCHEDULES]
    assert rows[1].ratios == pytest.approx((0.95, 0.95, 0.95))
    assert [row.off for row in rows] == pytest.approx([0, 0.9 / 0.95 - 1, 0.85 / 0.8 - 1])
    assert "simulated 0.900: -5.3%" in str(rows[1])
