"""A GPU and the process that starts its work: who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Link
from tests.support.pipelines import chain, even_costs, stepped


def step_s(
    host_f: float, host_b: float, *, count: int = 1, m: int = 4, latency: float = 0
) -> float:
    costs = even_costs(count, Link(latency, float("inf")), f=1.0, b=2.0)
    own = replace(costs, host_forward_s=(host_f,) * count, host_backward_s=(host_b,) * count)
    return stepped(chain(count), own, m=m).step_s


def test_a_process_that_is_faster_costs_nothing() -> None:
    assert step_s(0.5, 1.0) == step_s(0.0, 0.0) == pytest.approx(12.0)


def test_a_process_that_is_slower_holds_its_gpu_up() -> None:
    assert step_s(3.0, 3.0) == pytest.approx(24.0)


def test_a_process_that_is_ahead_helps_later() -> None:
    """Forwards that it starts slowly are made up for while long backwards run.

    process  |f0  |f1  |f2  |f3  |b0|b1|b2|b3|
    GPU         f0|  f1|  f2|  f3|  b0   |  b1   | ...
    """
    assert step_s(1.5, 0.5) == pytest.approx(4 * 1.5 + 4 * 2.0)


def test_a_process_goes_on_while_its_gpu_waits_for_a_message() -> None:
    slow = step_s(1.0, 2.0, count=2, latency=10.0)
    assert slow == pytest.approx(step_s(0.0, 0.0, count=2, latency=10.0))
