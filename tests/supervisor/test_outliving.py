"""Groups of processes that end with whoever started them, also where that was killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bigbrain_fx.bundles.child_programs import run_group
from bigbrain_fx.supervisor.outliving import OUTLIVING, Outliving

LIMIT_S = 20.0
# A leader with a child, which hold the same pipe open: it ends with the last of them.
LEADER = (
    "import subprocess, time; subprocess.Popen(['sleep', '600'], close_fds=False); time.sleep(600)"
)
LAUNCHER = f"""
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from bigbrain_fx.supervisor.processes import Order, popen
from pathlib import Path
given = (sys.executable, "-c", {LEADER!r})
line = os.open(os.devnull, os.O_RDONLY)
order = Order("d0", given, Path(sys.argv[2]), dict(os.environ), line, Path(sys.argv[2]) / "log")
held = lambda *words, **how: subprocess.Popen(*words, pass_fds=(int(sys.argv[3]),), **how)
group = popen(order, held)
print(group.pid, flush=True)
time.sleep(600)
"""
DROPPING = """
import sys, time
sys.path.insert(0, {root!r})
from bigbrain_fx.supervisor.outliving import OUTLIVING
for group in ({one}, {other}):
    OUTLIVING.add(group)
OUTLIVING.drop({one})
print(flush=True)
time.sleep(600)
"""
ROOT = Path(__file__).resolve().parents[2]


def is_closed(pipe: int) -> bool:
    """Wait for the end of all that hold the other end of a pipe; return whether it came."""
    ready, _, _ = select.select([pipe], [], [], LIMIT_S)
    return bool(ready) and os.read(pipe, 1) == b""


@contextmanager
def a_group() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a leader and its child; give it, and a pipe that both hold."""
    pipe, theirs = os.pipe()
    words = (sys.executable, "-c", LEADER)
    leader = subprocess.Popen(words, pass_fds=(theirs,), start_new_session=True)
    os.close(theirs)
    try:
        yield leader, pipe
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        os.close(pipe)


def test_processes_of_a_process_end_when_its_launcher_is_killed(tmp_path: Path) -> None:
    ends_with_its_launcher(LAUNCHER, tmp_path)


def ends_with_its_launcher(text: str, folder: Path) -> None:
    """Kill a launcher; whatever holds the other end of a pipe must let it go."""
    pipe, theirs = os.pipe()
    words = (sys.executable, "-c", text, str(ROOT), str(folder), str(theirs))
    launcher = subprocess.Popen(words, pass_fds=(theirs,), stdout=subprocess.PIPE)
    os.close(theirs)
    with launcher:
        assert launcher.stdout is not None
        assert int(launcher.stdout.readline()) > 0
        launcher.kill()
        assert is_closed(pipe)
    os.close(pipe)


def test_waiting_processes_end_with_the_last_group() -> None:
    outliving = Outliving()
    with a_group() as (one, _), a_group() as (other, _):
        outliving.add(one.pid)
        outliving.add(other.pid)
        first = outliving._waits
        outliving.drop(one.pid)
        second = outliving._waits
        assert first is not None
        assert first.returncode == -signal.SIGKILL
        assert second is not None
        assert second.poll() is None
        outliving.drop(other.pid)
        assert second.returncode == -signal.SIGKILL
        assert outliving._waits is None
        assert one.poll() is None, "a group that is done with is ended"


def test_a_group_that_is_done_with_is_left_alone(tmp_path: Path) -> None:
    with a_group() as (one, _), a_group() as (other, pipe):
        text = DROPPING.format(root=str(ROOT), one=one.pid, other=other.pid)
        launcher = subprocess.Popen((sys.executable, "-c", text), stdout=subprocess.PIPE)
        with launcher:
            assert launcher.stdout is not None
            launcher.stdout.readline()
            launcher.kill()
        assert is_closed(pipe)
        assert one.poll() is None


def test_nothing_waits_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    outliving = Outliving()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    outliving.add(10**9)
    assert outliving._waits is None
    outliving.drop(10**9)


def test_a_program_that_has_run_leaves_nothing() -> None:
    pipe, theirs = os.pipe()
    text = "import subprocess; subprocess.Popen(['sleep', '600'])"
    done = run_group((sys.executable, "-c", text), LIMIT_S, output=theirs, errors=theirs)
    os.close(theirs)
    assert done.returncode == 0
    assert is_closed(pipe)
    assert OUTLIVING._waits is None
    os.close(pipe)
