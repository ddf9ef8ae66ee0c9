"""How long plain runs are tried does not depend on who else computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from bigbrain_fx.frontend.tracing import budget as room, counters
from bigbrain_fx.frontend.tracing.budget import budget


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds of this thread and of the clock, as a test says; the budget alone is told them."""
    now = SimpleNamespace(own=100.0, clock=9_000.0)
    told = SimpleNamespace(thread_time=lambda: now.own, perf_counter=lambda: now.clock)
    monkeypatch.setattr(room, "time", told)
    monkeypatch.setattr(room, "slowness", lambda: 1.0)
    return now


def test_it_ends_with_the_threads_own_seconds(seconds: SimpleNamespace) -> None:
    is_over = budget(2.0)
    seconds.own += 1.9
    assert not is_over()
    seconds.own += 0.2
    assert is_over()


def test_others_may_use_four_fifths_of_the_processor(seconds: SimpleNamespace) -> None:
    is_over = budget(2.0)
    seconds.own, seconds.clock = seconds.own + 1.9, seconds.clock + 9.9
    assert not is_over()


def test_what_waits_for_ever_is_over_too(seconds: SimpleNamespace) -> None:
    is_over = budget(2.0)
    seconds.clock += 10.1
    assert is_over()


def test_a_machine_a_third_as_fast_has_three_times_as_long(
    seconds: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,700 calls took longer than two seconds there, and what changed then was taken."""
    monkeypatch.setattr(room, "slowness", lambda: 3.0)
    is_over = budget(2.0)
    seconds.own, seconds.clock = seconds.own + 5.9, seconds.clock + 29.0
    assert not is_over()
    seconds.own += 0.2
    assert is_over()


@pytest.mark.parametrize(("taken_s", "times"), [(0.0002, 1.0), (0.0012, 3.0), (1.0, 10.0)])
def test_the_quickest_of_three_loops_tells_how_slow_a_machine_is(
    taken_s: float, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter((2 * taken_s, taken_s, 9 * taken_s))
    monkeypatch.setattr(room, "_loop_s", lambda: next(found))
    assert room.slowness.__wrapped__() == pytest.approx(times)


@pytest.mark.parametrize(("own_s", "all_made"), [(0.01, True), (2.0, False)])
def test_moves_of_counters_go_by_the_threads_seconds(
    seconds: SimpleNamespace, own_s: float, all_made: bool
) -> None:
    made = list(_taking(own_s, counters.moves, seconds))
    assert (len(made) == len(counters._LATER) + len(counters._ROUND)) is all_made
    assert counters._LATER[-1] in made


def _taking(
    own_s: float, moves: Callable[[], Iterator[counters.Move]], seconds: SimpleNamespace
) -> Iterator[int]:
    for runs, _, _ in moves():
        seconds.own, seconds.clock = seconds.own + own_s, seconds.clock + 1.1 * own_s
        yield runs
