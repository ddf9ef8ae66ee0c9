"""The last one out: remove what an emulation left in the control groups, however it ended.

    python watchdog.py OWNER FOLDER...   (a program of its own: it imports nothing of ours)

It waits for the process OWNER to end, or for its stdin to close, then kills whatever is in the
folders' groups and removes the folders. It has a session of its own, so that neither Ctrl-C nor the
end of a terminal reaches it. Namespaces and processes need no such care: they end with their owner.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PATIENCE_S = 10.0
POLL_S = 0.02


def main() -> None:
    """Wait for the owner's end; sweep."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        owner = [os.pidfd_open(int(sys.argv[1]))]
    except ProcessLookupError:
        owner = []  # gone already
    if owner:
        select.select([*owner, sys.stdin], (), ())
    sweep(map(Path, sys.argv[2:]))


def sweep(folders: Iterable[Path]) -> list[Path]:
    """Kill what is in these groups and remove them; return those that could not be removed."""
    left = [folder for folder in folders if folder.is_dir()]
    until = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < until:
        for folder in left:
            _kill(folder)
        left = [folder for folder in left if not _removed(folder)]
        if left:
            time.sleep(POLL_S)  # the kernel tells nobody when a killed process has left its group
    return left


def _kill(folder: Path) -> None:
    for file in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):  # a group that went, or (v2) one of threads
            for pid in file.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _removed(folder: Path) -> bool:
    """Remove a group and those in it, innermost first."""
    try:
        for path, _, _ in os.walk(folder, topdown=False):
            os.rmdir(path)
    except FileNotFoundError:
        return not folder.exists()  # another sweep is at it
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
