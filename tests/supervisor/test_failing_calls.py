"""What a supervisor says does not arrive, or is not heard, in a run in which a device dies, too.

Calls that fail once are struck in test_every_place_fails.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bigbrain_fx.bundles.launch import RunOptions, StepLine, run
from bigbrain_fx.supervisor import Event
from bigbrain_fx.supervisor.crew import Crew
from bigbrain_fx.supervisor.events import EventLog
from bigbrain_fx.supervisor.job import Job
from bigbrain_fx.supervisor.pipe import line_pair
from bigbrain_fx.supervisor.processes import Member, popen
from tests.support.bundles import copied, edit, split_small, writing_everything
from tests.support.killing import kill_once

STEPS, KILLED_IN = 5, 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = split_small(tmp_path_factory.mktemp("calls"))
    kill_once(made, KILLED_IN)
    edit(made / "train.py", "from pathlib", "import os\nfrom pathlib")
    return made


def losses_of(bundle: Path, folder: Path) -> list[float]:
    """Run it as users do, with everything that is written; d1 dies in it."""
    copy, losses, events = copied(bundle, folder), list[float](), list[Event]()
    options = writing_everything(folder, STEPS, spares=0)
    run(copy, options, lambda line: losses.append(line.loss), on_event=events.append)
    assert [e["device"] for e in events if e["event"] == "died"] == ["d1"]
    return losses


@pytest.mark.nightly
def test_a_socket_that_fails_once(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending and hearing: the kernel has no memory now and then."""
    from bigbrain_fx.supervisor import pipe as lines

    class Short(socket.socket):
        calls = 0

        def sendmsg(self, *args: Any) -> int:
            Short.calls += 1
            if Short.calls % 3 == 0:
                raise OSError(errno.ENOBUFS, "no memory for a packet")
            return super().sendmsg(*args)

        def recv(self, *args: Any) -> bytes:
            Short.calls += 1
            if Short.calls % 5 == 0:
                raise OSError(errno.ENOMEM, "no memory for a packet")
            return super().recv(*args)

    undisturbed, pair = losses_of(bundle, tmp_path / "undisturbed"), lines.line_pair

    def short_pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        return Short(fileno=ours.detach()), theirs

    monkeypatch.setattr("bigbrain_fx.supervisor.crew.line_pair", short_pair)
    assert losses_of(bundle, tmp_path / "short") == undisturbed
    assert Short.calls > 30


def test_a_process_whose_end_was_heard_first_says_nothing_more() -> None:
    """One turn may have both its end and its last words: the line is closed at the first."""
    job = SimpleNamespace(beat_s=1.0, devices=())
    crew = Crew(cast(Job, job), popen, EventLog(None), lambda *_: None, lambda *_: None)
    ours, theirs = line_pair()
    ours.close()
    theirs.close()
    crew._listen(cast(Member, SimpleNamespace(line=ours)))
    crew.close()


# --------------------------------------------------------------------------- who is told


@pytest.mark.nightly
def test_a_listener_whose_pipe_is_gone_changes_nothing(bundle: Path, tmp_path: Path) -> None:
    copy, calls = copied(bundle, tmp_path), list[StepLine]()

    def gone(line: StepLine) -> None:
        calls.append(line)
        raise BrokenPipeError

    done = run(copy, RunOptions(STEPS, spares=0), gone, on_event=lambda _: None)
    assert [line.step for line in done.steps] == list(range(STEPS))
    assert len(calls) == 1


@pytest.mark.nightly
def test_a_listener_that_waits_does_not_hold_up_the_run(bundle: Path, tmp_path: Path) -> None:
    copy, gate = copied(bundle, tmp_path), threading.Event()

    def event(entry: Event) -> None:
        if entry["event"] == "started":
            assert gate.wait(60.0)

    def steps(line: StepLine) -> None:
        order.append(line.step)

    order: list[int] = []
    watcher = threading.Thread(target=open_after_steps, args=(copy, gate))
    edit(
        copy / "train.py", "HOOKS.on_step_end", "HOOKS.on_step_end.append(note)\nHOOKS.on_step_end"
    )
    edit(copy / "train.py", "def kill_once", NOTE + "def kill_once")
    watcher.start()
    done = run(copy, RunOptions(STEPS, spares=0), steps, on_event=event)
    watcher.join(60.0)
    assert len(done.steps) == STEPS
    assert order == list(range(STEPS))


NOTE = '''def note(device, step):
    """Say that it was done."""
    Path(__file__).with_name(f"done-{step}").touch()


'''


def open_after_steps(copy: Path, gate: threading.Event) -> None:
    until = time.monotonic() + 50.0
    while time.monotonic() < until and not (copy / f"done-{STEPS - 1}").exists():
        time.sleep(0.02)
    gate.set()
