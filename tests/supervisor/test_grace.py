"""How long a request to stop may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from bigbrain_fx.supervisor.grace import Grace
from bigbrain_fx.supervisor.stopping import Stopping


def asked_at(time: float | None) -> Grace:
    crew: Any = SimpleNamespace(job=SimpleNamespace(grace_s=None))
    return Grace(cast("Any", crew), Stopping(time), cast("Any", None))


def test_the_grace_covers_the_steps_of_the_run() -> None:
    grace = asked_at(None)
    assert grace.of_step(untimed_s=300.0, hang_s=5.0) == 300.0
    grace.step_took(2.0, now=1.0)
    assert grace.of_step(300.0, 5.0) == 30.0
    grace.step_took(45.0, now=2.0)
    assert grace.of_step(300.0, 5.0) == 135.0


def test_the_grace_covers_a_step_longer_than_all_before() -> None:
    grace = asked_at(None)
    grace.step_took(0.1, now=1.0)
    assert grace.of_step(300.0, hang_s=60.0) == 60.0  # it may have begun just now
    grace.stopping.ask(now=101.0)
    grace.stopping.ask(now=201.0)  # a second request changes nothing
    grace.move(301.0)
    assert grace.of_step(300.0, hang_s=60.0) == 300.0


def test_the_grace_begins_anew_with_progress() -> None:
    grace = asked_at(None)
    grace.move(5.0)
    assert not grace.is_late(100.0, 2.0)  # nobody has asked
    grace.stopping.ask(10.0)
    assert [grace.is_late(now, grace_s=2.0) for now in (12.0, 12.5)] == [False, True]
    grace.move(12.0)
    assert [grace.is_late(now, grace_s=2.0) for now in (12.5, 14.5)] == [False, True]


def test_the_grace_is_longer_for_starved_processes() -> None:
    grace = asked_at(None)
    grace.wait_longer(5.0, 100.0)
    grace.stopping.ask(100.0)
    assert grace.is_late(131.0, 30.0)
    grace.wait_longer(20.0, 131.0)
    assert not grace.is_late(149.0, 30.0)
    assert grace.is_late(151.0, 30.0)
