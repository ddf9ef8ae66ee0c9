"""A supervisor that was stopped (Ctrl-Z, SIGSTOP) and goes on: no deadline has passed meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigbrain_fx.supervisor import FailedError, processes, watch
from bigbrain_fx.supervisor.processes import AwakeClock
from tests.support.puppets import Stage, stage

STOPPED_S = 1000.0


class Pause:
    """Lets a supervisor's clock jump, as it does for a process that was stopped."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.total_s

    def stop(self, seconds: float = STOPPED_S) -> bool:
        self.total_s += seconds
        return False


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Pause:
    made = Pause()
    clock = SimpleNamespace(monotonic=made.monotonic, sleep=time.sleep)
    monkeypatch.setattr(processes, "time", clock)
    return made


def turns(seen: Stage, count: int) -> None:
    numbers = iter(range(count + 1))
    seen.turn_until(lambda: next(numbers) == count)


def test_only_time_in_which_it_ran_counts(pause: Pause) -> None:
    clock = AwakeClock(1.0)
    start = clock.now()
    pause.stop(1.9)  # it was busy
    assert 1.9 <= clock.now() - start < 2.5
    pause.stop()
    assert 2.9 <= clock.now() - start < 3.5  # one look's worth
    for _ in range(50):  # starved for good: it still gets on
        pause.stop(10.0)
        clock.now()
    assert clock.now() - start > 50.0


@pytest.mark.parametrize("stopped_s", [0.3, 5.0, STOPPED_S])
def test_nobody_hangs_and_nobody_is_late_to_start(
    tmp_path: Path, pause: Pause, stopped_s: float
) -> None:
    with stage(tmp_path, start_s=200.0) as seen:
        supervisor = seen.supervisor
        for name in supervisor.job.devices:
            supervisor._become(supervisor.crew.start(name, ""), name)
        turns(seen, 2)
        pause.stop(stopped_s)
        turns(seen, 2)
        seen.connect()
        for puppet in seen.puppets:
            puppet.say("beat", n=1, step=0, waiting=None)  # at work, and heard
        turns(seen, 2)
        pause.stop(stopped_s)
        turns(seen, 4)
        assert not seen.of("hang")
        assert not seen.of("died")


def test_a_run_that_ends_on_request_is_not_late(tmp_path: Path, pause: Pause) -> None:
    with stage(tmp_path, grace_s=20.0) as seen:
        seen.begin()
        seen.supervisor.ask_to_stop()
        turns(seen, 2)
        pause.stop()
        turns(seen, 4)  # a device has not said yet where it is
        assert not seen.of("failed")
        with pytest.raises(FailedError, match="it did not stop within 20 s"):
            seen.turn_until(lambda: pause.stop(0.4))  # looked at all the time it is late


def test_a_death_is_still_waited_for(tmp_path: Path, pause: Pause) -> None:
    """What was ended just before the stop has its whole time to end."""
    with stage(tmp_path) as seen:
        seen.begin()
        stuck = seen.puppets[1]
        stuck.process.kill = lambda: None  # type: ignore[method-assign]
        stuck.say("beat", n=1, step=3, waiting=None)  # it computes, for ever
        stuck.is_silent = True
        seen.turn_until(lambda: bool(seen.of("hang")))
        pause.stop()
        turns(seen, 3)
        stuck.end(-9)
        seen.turn_until(lambda: bool(seen.of("assigned")))
        assert not seen.of("failed")


@pytest.mark.nightly
def test_a_finished_process_may_leave_slowly(tmp_path: Path, pause: Pause) -> None:
    """Python and torch end in silence, on a busy host for seconds; but not for ever."""
    with stage(tmp_path) as seen:
        seen.begin()
        for puppet in seen.puppets:
            puppet.say("finished")
        seen.turn_until(lambda: all("end" in puppet.hear() for puppet in seen.puppets))
        for puppet in seen.puppets:
            puppet.is_silent = True
        for _ in range(int(watch.LEAVE_S / 0.5) - 4):
            pause.stop(0.4)
            seen.supervisor._turn()
        assert not seen.of("hang")
        seen.turn_until(lambda: pause.stop(0.4) or len(seen.of("hang")) == 2)
