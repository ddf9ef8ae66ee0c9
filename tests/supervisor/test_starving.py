"""Processes on a busy host: time in which one had no processor is not held against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigbrain_fx.supervisor.starving import Starving
from tests.support.puppets import Puppet, stage

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
