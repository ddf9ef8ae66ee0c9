"""The launcher of this process, and its arguments: read before any long import.

The process exits when its launcher dies. The arguments of train.py or infer.py are hidden from the
user's code, as a model file may parse a command line of its own. At the split the file
found no arguments; with `--steps` or `--seed` of a run it might train another model than was split.
This file is stdlib only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path

LAUNCHER = "BIGBRAIN_LAUNCHER"  # in the environment: the id of the process that started this one
CALLED_IN = "BIGBRAIN_CALLED_IN"  # where the user called it; this process works in the bundle
GONE = 75  # exit code: as where a peer is lost
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to end this process with its parent, also while it is stopped."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_launcher() -> None:
    """End with the launcher, if there is one; it may have ended before this is asked.

    A process between the two has to end with the launcher by itself.
    """
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if not launcher:
        return
    is_child = os.getppid() == launcher
    if is_child:
        end_with_parent()
    if (is_child and os.getppid() != launcher) or not _is_there(launcher):
        sys.exit(GONE)


def as_called(path: str) -> Path:
    """Return a path of the command line as the user meant it: from the folder of the call."""
    return Path(_called_in(), path)


@functools.cache
def _called_in() -> str:
    return os.environ.pop(CALLED_IN, "")  # what this process starts was not called there


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has become another user
        return True
    return True


end_with_launcher()


PROGRAMS = ("train.py", "infer.py")


def take(folder: Path) -> list[str] | None:
    """Take the words from `sys.argv`, if the program is one of the bundle in this folder."""
    program = Path(sys.argv[0] if sys.argv else "")
    if program.name not in PROGRAMS or program.resolve().parent != folder:
        return None
    words = sys.argv[1:]
    del sys.argv[1:]
    return words


def words() -> list[str]:
    """Return the words of the bundle's program, or those of the program that imported it."""
    return sys.argv[1:] if _TAKEN is None else _TAKEN


_TAKEN = take(Path(__file__).resolve().parents[1])  # as the bundle is imported, before user code is
