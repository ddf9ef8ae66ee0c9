"""A process ends with whoever started it, also when that is killed while this still imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from bigbrain_fx.runtime import launcher
from bigbrain_fx.supervisor import LAUNCHER

FILE = str(launcher.__file__)
RUN = f"import runpy, time; runpy.run_path({FILE!r}); print('goes on', flush=True); time.sleep(100)"
STARTS = f"""
import os, subprocess, sys
words = [sys.executable, "-c", {RUN!r}]
child = subprocess.Popen(words, env={{**os.environ, {LAUNCHER!r}: str(os.getpid())}}, stdout=1)
child.wait()
"""
DEADLINE_S = 20.0


def _started(words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    around = {**os.environ, **(environment or {})}
    command = [sys.executable, "-c", words]
    return subprocess.Popen(command, env=around, stdout=subprocess.PIPE, text=True)


def test_a_process_ends_with_its_launcher() -> None:
    with _started(STARTS) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "goes on\n"
        starter.kill()
        assert starter.stdout.read() == ""  # it has the pipe as long as it is there


def test_a_process_ends_at_once_where_its_launcher_is_gone() -> None:
    with _started("") as gone:
        gone.wait(DEADLINE_S)
    with _started(RUN, {LAUNCHER: str(gone.pid)}) as late:
        said, _ = late.communicate(timeout=DEADLINE_S)
    assert (late.returncode, said) == (launcher.GONE, "")


def test_other_processes_go_on_without_the_launcher() -> None:
    """Who is started by hand, or by something that a launcher has started, names nobody or it."""
    for given in ({}, {LAUNCHER: str(os.getppid())}):
        with _started(RUN, given) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "goes on\n"
            process.send_signal(signal.SIGKILL)


def test_both_ends_use_one_name() -> None:
    assert launcher.LAUNCHER == LAUNCHER
