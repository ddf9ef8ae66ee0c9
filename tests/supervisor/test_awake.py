"""Supervisors that were stopped and go on, and processes on a busy host: no deadline has passed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigbrain_fx.supervisor import FailedError, processes, watch
from bigbrain_fx.supervisor.processes import AwakeClock
from bigbrain_fx.supervisor.starving import Starving
from tests.support.puppets import Puppet, Stage, stage

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


# --------------------------------------------------------------------------- a busy host


HANG_S = 0.4


def starve(puppet: Puppet, since: float) -> None:
    """Let the kernel say that a process has waited for a processor all the time."""
    puppet.process.starving.total_s = time.monotonic() - since


def test_a_starved_process_is_not_ended_and_a_hung_one_is(tmp_path: Path) -> None:
    """Both are silent, within one instruction, and only one has been ready to run."""
    with stage(tmp_path, hang_s=HANG_S) as seen:
        seen.begin()
        for puppet in seen.puppets:
            puppet.say("beat", n=1, step=3, waiting=None)
            puppet.is_silent = True
        start = time.monotonic()

        def is_hung() -> bool:
            starve(seen.puppets[0], start)
            return bool(seen.of("hang"))

        seen.turn_until(is_hung)
        assert time.monotonic() - start < 5 * HANG_S  # that it ends does not wait for the other
        assert [event["device"] for event in seen.of("hang")] == ["d1"]


@pytest.mark.nightly
def test_once_it_has_processors_again_the_limit_holds(tmp_path: Path) -> None:
    with stage(tmp_path, hang_s=HANG_S) as seen:
        seen.begin()
        starved = seen.puppets[0]
        starved.say("beat", n=1, step=3, waiting=None)
        starved.is_silent = True
        start = time.monotonic()

        def is_told() -> bool:
            starve(starved, start)
            return bool(seen.of("starved"))

        seen.turn_until(is_told)
        seen.turn_until(lambda: is_told() and time.monotonic() > start + 4 * HANG_S)
        assert not seen.of("hang")
        assert len(seen.of("starved")) == 1
        seen.turn_until(lambda: bool(seen.of("hang")))
        assert seen.of("hang")[0]["device"] == "d0"


def test_a_process_that_comes_slowly_to_its_first_step_is_waited_for(tmp_path: Path) -> None:
    with stage(tmp_path, hang_s=HANG_S, start_s=HANG_S) as seen:
        supervisor = seen.supervisor
        for name in supervisor.job.devices:
            supervisor._become(supervisor.crew.start(name, ""), name)
        start = time.monotonic()

        def is_over() -> bool:
            starve(seen.puppets[0], start)
            return bool(seen.of("hang"))

        seen.turn_until(is_over)
        assert [event["device"] for event in seen.of("hang")] == ["d1"]


def test_a_process_that_is_stopped_before_its_heart_beats_is_ended_as_a_hung_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for as for one that starts slowly, 300 s."""
    with stage(tmp_path, hang_s=HANG_S) as seen:
        supervisor = seen.supervisor
        for name in supervisor.job.devices:
            supervisor._become(supervisor.crew.start(name, ""), name)
        monkeypatch.setattr(seen.puppets[1].process.starving, "is_stopped", lambda: True)
        seen.turn_until(lambda: bool(seen.of("hang")))
        assert [event["device"] for event in seen.of("hang")] == ["d1"]


def test_the_kernel_tells_that_a_process_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        starving = Starving(process.pid)
        assert not starving.is_stopped()
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 10
        while not starving.is_stopped():
            assert time.monotonic() < until
            time.sleep(0.01)
        process.kill()
    assert not starving.is_stopped()


def test_of_threads_that_wait_at_a_time_the_longest_counts(tmp_path: Path) -> None:
    def waited(thread: int, seconds: float) -> None:
        (tmp_path / str(thread)).mkdir(exist_ok=True)
        (tmp_path / str(thread) / "schedstat").write_text(f"7 {round(seconds * 1e9)} 3\n")

    waited(1, 2.0)
    starving = Starving(0, tmp_path)
    assert starving.look() == 2.0
    waited(1, 5.0)
    waited(2, 1.0)
    assert starving.look() == 5.0
    waited(2, 5.0)
    (tmp_path / "1" / "schedstat").unlink()  # it has ended
    assert starving.look() == 9.0


def test_the_kernel_tells_of_this_process_and_of_none_that_has_ended() -> None:
    starving = Starving(os.getpid())
    assert 0.0 <= starving.look() <= starving.look()
    assert Starving(2**22 + 1).look() == 0.0
