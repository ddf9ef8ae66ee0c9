"""Start the workers, wait for them with a deadline, collect what they wrote, end what is left.

This room knows processes; what they measure is theirs to know.
"""

from __future__ import annotations

import json
import os
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
from bigbrain_fx.launch import Command, Process, Spawn, free_port, popen

WORKER = (sys.executable, "-m", "bigbrain_fx.doctor.worker")
_PACKAGES = Path(__file__).resolve().parents[2]
_POLL_S = 0.05
_TAIL_LINES = 8


class ProbeError(BigBrainError):
    """Report that the measurement itself failed (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Fleet:
    """What processes to start, what they measure, and for how long.

    Attributes:
        names: of the devices, by rank; two at least, for the link.
        threads: CPU threads of each.
        busy: how many compute at once; the others only wait.
        linked: the links between the first so many are measured, pair by pair.
        window_s: seconds that one measurement takes.
        deadline_s: after this the fleet is ended.
        gpus: measure GPUs too, where there are any.
        table: measure matrix products by size and dtype too.
        shared_cores: the devices leave no core of their host idle.
    """

    names: tuple[str, ...]
    threads: tuple[int, ...]
    busy: int
    linked: int
    window_s: float
    deadline_s: float
    gpus: bool = False
    table: bool = False
    shared_cores: bool = False


def run(
    fleet: Fleet, worker: Sequence[str] = WORKER, spawn: Spawn = popen
) -> list[Mapping[str, Any]]:
    """Run the fleet to its end; return what each process wrote, by rank.

    Args:
        fleet: what to run.
        worker: the program of each process.
        spawn: starts a process; as a child on this host, or in another place.

    Raises:
        ProbeError: a worker failed or the deadline passed; holds the last lines it printed.
    """
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bigbrain-fx-doctor-"))
        )
        port = free_port()
        children: list[Process] = []
        for rank in range(len(fleet.names)):
            children.append(spawn(_command(fleet, rank, port, folder, worker)))
            stack.callback(_end, children[-1])
        _wait(children, folder, time.monotonic() + fleet.deadline_s)
        return [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(len(fleet.names))
        ]


def _command(fleet: Fleet, rank: int, port: int, folder: Path, worker: Sequence[str]) -> Command:
    numbers = {
        "rank": rank,
        "world": len(fleet.names),
        "busy": fleet.busy,
        "linked": fleet.linked,
        "threads": fleet.threads[rank],
        "window-s": fleet.window_s,
        "deadline-s": fleet.deadline_s,
        "out": folder / f"{rank}.json",
    }
    arguments = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    switches = {
        "--gpus": fleet.gpus,
        "--table": fleet.table,
        "--shared-cores": fleet.shared_cores,
    }
    return Command(
        device=fleet.names[rank],
        words=(*worker, *arguments, *(name for name, is_on in switches.items() if is_on)),
        folder=folder,  # `-m` looks here first, not in the user's folder with its torch.py
        environment=_environment(fleet, rank, port),
        log=folder / f"{rank}.log",
        reports=False,
    )


def _environment(fleet: Fleet, rank: int, port: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]))
    kept = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_USE_AGENT_STORE"}
    threads = str(fleet.threads[rank])
    return {
        **kept,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(fleet.names)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def _wait(children: Sequence[Process], folder: Path, deadline: float) -> None:
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


def _end(child: Process) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
