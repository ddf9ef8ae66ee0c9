"""Listeners of a supervisor that do not take what it says, and connections that fail."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bigbrain_fx.supervisor import EventLog, FailedError
from bigbrain_fx.supervisor.aside import Aside, AsideConsole
from bigbrain_fx.supervisor.console import Console
from bigbrain_fx.supervisor.events import status
from tests.supervisor.test_failing_lines import LIMIT_S, until
from tests.support.puppets import Stage, stage

NOT_READ = 200  # lines


def test_nobody_waits_for_a_listener_and_the_oldest_is_dropped() -> None:
    gate, seen, aside = threading.Event(), list[int](), Aside(room=3)
    aside.give(lambda: gate.wait(LIMIT_S))
    until(lambda: not aside.waiting)
    for number in range(10):
        aside.give(partial(seen.append, number))
    gate.set()
    aside.close()
    assert seen == [7, 8, 9]
    assert aside.dropped == 7


def test_a_listener_that_is_gone_is_not_called_again_and_an_error_comes_out() -> None:
    def gone() -> None:
        raise BrokenPipeError

    aside = Aside()
    for _ in range(5):
        aside.give(gone)
    aside.close()
    assert aside.dropped == 5
    aside = Aside()
    aside.give(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        aside.close()


def test_a_console_whose_reader_is_stopped_does_not_hold_up_the_end() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as there, os.fdopen(writer, "w") as stream:
        console = AsideConsole(stream)
        start = time.monotonic()
        for _ in range(NOT_READ):
            console.say("x" * 10_000)
        assert time.monotonic() - start < 5.0
        console.aside.close(0.1)
        assert 0 < console.aside.dropped < NOT_READ
        there.read(1 << 20)


def test_a_console_whose_reader_is_gone_and_one_that_is_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = AsideConsole(stream)
        console.say("x")
        assert console.close() == 1
    console = AsideConsole(None)
    console.say("x")
    assert console.close() == 0


# --------------------------------------------------------------------------- events


def test_events_that_a_disk_does_not_take_are_told_of_once() -> None:
    heard: list[str] = []
    log = EventLog(Path("/dev/full"), lambda entry: heard.append(entry["event"]))
    for _ in range(3):
        log.write("formed", 0, after_s=0.1)
    log.close()
    assert heard.count("events_lost") == 1
    assert heard.count("formed") == 3


def test_a_line_of_events_that_was_cut_off_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "events.jsonl", os.write
    log = EventLog(path)
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:10]))
    log.write("formed", 0, after_s=0.1)
    monkeypatch.undo()
    log.write("formed", 1, after_s=0.2)
    log.close()
    first, *_, last = path.read_text().splitlines()
    assert len(first) == 10
    assert json.loads(last)["generation"] == 1


def test_events_where_no_file_can_be_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        EventLog(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device"):  # nobody reads it
        EventLog(tmp_path / "fifo")


def test_lines_that_are_written_at_once_are_lost_where_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = Console(stream)
        console.say("x")
        assert console.close() == 1


# --------------------------------------------------------------------------- connections


TEXT = "PeerLostError: the connection to d0: reset by peer"


def lose(on: Stage) -> None:
    """Let d1 report a lost connection, with a text that has a colon in it."""
    on.puppets[1].say("lost", generation=0, text=TEXT, alive=True)


def lock(on: Stage) -> None:
    """Let all devices wait for each other, as the watch finds it."""
    on.supervisor.rendezvous.lock(on.supervisor.crew.clock.now())


def test_the_event_names_the_device_that_reported_it(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.begin()
        lose(on)
        on.turn_until(lambda: bool(on.of("links_lost")))
    (entry,) = on.of("links_lost")
    assert (entry["device"], entry["text"]) == ("d1", TEXT)
    assert f"d1: {TEXT}" in str(status(entry))


def test_devices_that_wait_for_each_other_are_no_device(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.begin()
        lock(on)
        on.turn_until(lambda: bool(on.of("links_lost")))
    (entry,) = on.of("links_lost")
    assert "device" not in entry
    assert str(status(entry)).endswith(entry["text"])


@pytest.mark.parametrize(("how", "device"), [(lose, "d1"), (lock, None)])
def test_the_error_after_the_last_try_has_that_device(
    tmp_path: Path, how: Callable[[Stage], None], device: str | None
) -> None:
    with stage(tmp_path, restarts=0) as on:
        on.begin()
        how(on)
        with pytest.raises(FailedError) as failed:
            on.turn_until(lambda: False)
    assert failed.value.death.device == device
    assert not failed.value.moves
