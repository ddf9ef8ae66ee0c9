"""Start the workers, wait for them with a deadline, collect what they wrote, end what is left.

This room knows processes; what they measure is theirs to know.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import BigBrainError

WORKER = (sys.executable, "-m", "bigbrain_fx.doctor.worker")
_PACKAGES = Path(__file__).resolve().parents[2]
_POLL_S = 0.05
_TAIL_LINES = 8


class ProbeError(BigBrainError):
    """Report that the measurement itself failed (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Fleet:
    """How many processes to start, how many of them compute, and for how long.

    Attributes:
        world: processes; two at least, for the link.
        busy: how many compute at once; the others only wait.
        window_s: seconds that one measurement takes.
        deadline_s: after this the fleet is ended.
    """

    world: int
    busy: int
    threads: int
    window_s: float
    deadline_s: float
    gpus: bool


def run(fleet: Fleet, worker: Sequence[str] = WORKER) -> list[Mapping[str, Any]]:
    """Run the fleet to its end; return what each process wrote, by rank.

    Raises:
        ProbeError: a worker failed or the deadline passed; holds the last lines it printed.
    """
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bigbrain-fx-doctor-"))
        )
        # Bound here, to loopback: TCPStore by itself would listen on every address.
        with socket.create_server(("127.0.0.1", 0)) as server:
            children = [
                _start(fleet, rank, server, folder, worker, stack) for rank in range(fleet.world)
            ]
        _wait(children, folder, time.monotonic() + fleet.deadline_s)
        return [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(fleet.world)
        ]


def _start(
    fleet: Fleet,
    rank: int,
    server: socket.socket,
    folder: Path,
    worker: Sequence[str],
    stack: ExitStack,
) -> subprocess.Popen[bytes]:
    numbers = {
        "rank": rank,
        "world": fleet.world,
        "busy": fleet.busy,
        "threads": fleet.threads,
        "window-s": fleet.window_s,
        "deadline-s": fleet.deadline_s,
        "port": server.getsockname()[1],
        "listen-fd": server.fileno(),
        "out": folder / f"{rank}.json",
    }
    arguments = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    with (folder / f"{rank}.log").open("wb") as log:
        child = subprocess.Popen(
            [*worker, *arguments, *(["--gpus"] if fleet.gpus else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,  # `-m` looks here first, not in the user's folder with its torch.py
            env=_environment(fleet.threads),
            pass_fds=(server.fileno(),) if rank == 0 else (),
        )
    stack.callback(_end, child)
    return child


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def _wait(children: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Wait for all; the first that fails ends the wait, since the others would wait for it."""
    waiting = dict(enumerate(children))
    while waiting:
        for rank, child in list(waiting.items()):
            try:
                code = child.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            if code:
                raise _failure(f"the probe's process {rank} ended with code {code}", folder, rank)
            del waiting[rank]
        if waiting and time.monotonic() > deadline:
            rank = min(waiting)
            raise _failure(f"the probe's process {rank} did not end in time", folder, rank)


def _failure(what: str, folder: Path, rank: int) -> ProbeError:
    text = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return ProbeError(
        what,
        notes=tuple(lines[-_TAIL_LINES:]),
        help="is the loopback interface `lo` up, and is there memory for the processes? "
        "`bigbrain-fx init` writes a cluster.json to fill in by hand",
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
