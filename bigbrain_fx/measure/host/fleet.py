"""Start the workers, wait for them with a deadline, collect what they wrote, end what is left.

This module knows processes; what they measure is theirs to know.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.bundles import Command, Process, Spawn, free_port, popen
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import BEGINNING, told_error
from bigbrain_fx.measure.host.figures import Kind
from bigbrain_fx.measure.host.limits import usable_cores
from bigbrain_fx.weights import Scratch

WORKER = (sys.executable, "-m", BEGINNING, "bigbrain_fx.measure.host.worker")
_PACKAGES = Path(__file__).resolve().parents[3]
_POLL_S = 0.05
_TAIL_LINES = 8
_BUSY = 2  # processes for each core: the probe's own make one or so
_MOST_DEADLINES = 15  # a fleet that gets on, but for so many times as long, is ended all the same
ON_STDOUT = "-"  # in place of a file: a process in another place prints what it found
RESULT = "RESULT "  # and begins the line so
ALIVE = ".alive"  # ending of the file that a worker touches whenever it has got on
_START_S = 60.0  # until the slowest process has imported torch and joined
_CUDA_START_S = 120.0  # and has loaded CUDA's libraries
_CONNECT_S = 10.0  # in which two GPUs connect over nccl: once, and once for each channel
_MEASUREMENTS = 40  # windows that one device's own figures take at most, in slow motion
_LINK_WINDOWS = 16  # and those of one link


class ProbeError(BigBrainError):
    """Report that the measurement itself failed (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Fleet:
    """Processes to start, their measurements and durations.

    Attributes:
        names: of the devices, by rank; two at least, where a link is to be measured.
        kinds: "cpu" or "cuda", of each.
        threads: CPU threads of each.
        busy: how many compute at once; the others only wait.
        linked: the links between the first so many are measured, pair by pair.
        window_s: seconds that one measurement takes.
        deadline_s: a fleet of which nobody gets on for so long is ended; on a host with more to do
            than cores, longer in proportion.
        hosts: of each; empty where all are on one.
        gpus: rank 0 tells how many GPUs its host has.
        table: measure matrix products by size and dtype too.
        shared_cores: the devices leave no core of their host idle.
    """

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    threads: tuple[int, ...]
    busy: int
    linked: int
    window_s: float
    deadline_s: float
    hosts: tuple[str, ...] = ()
    gpus: bool = False
    table: bool = False
    shared_cores: bool = False

    def local_rank(self, rank: int) -> int:
        """Return a device's number among those of its host, which chooses a GPU: as in a bundle."""
        return self.hosts[:rank].count(self.hosts[rank]) if self.hosts else rank


def patience_s(kinds: Sequence[Kind], window_s: float) -> float:
    """Return how long a fleet that measures all its links may take: a deadline, no forecast."""
    pairs, has_gpus = math.comb(len(kinds), 2), "cuda" in kinds
    link_s = _LINK_WINDOWS * window_s + (_CONNECT_S if has_gpus else 0.0)
    start_s = _CUDA_START_S if has_gpus else _START_S
    return start_s + _MEASUREMENTS * window_s + pairs * link_s


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
        InputError: torch cannot be loaded in one.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(Scratch("doctor")))
        port = free_port()
        children: list[Process] = []
        for rank in range(len(fleet.names)):
            children.append(spawn(_command(fleet, rank, port, folder, worker)))
            stack.callback(_end, children[-1])
        _wait(fleet, children, folder)
        return [_result(folder, rank) for rank in range(len(fleet.names))]


def _result(folder: Path, rank: int) -> Mapping[str, Any]:
    """Return what a process wrote to its file, or printed."""
    file = folder / f"{rank}.json"
    if file.exists():
        text = file.read_text(encoding="utf-8")
    else:
        printed = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
        text = printed.rpartition(RESULT)[2].partition("\n")[0]
    found: Mapping[str, Any] = json.loads(text)
    return found


def _command(fleet: Fleet, rank: int, port: int, folder: Path, worker: Sequence[str]) -> Command:
    numbers = {
        "rank": rank,
        "kinds": ",".join(fleet.kinds),
        "busy": fleet.busy,
        "linked": fleet.linked,
        "threads": fleet.threads[rank],
        "window-s": fleet.window_s,
        "deadline-s": fleet.deadline_s * max(1.0, crowding()),  # as `_wait` has it
        "out": folder / f"{rank}.json",
    }
    arguments = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    switches = {"--gpus": fleet.gpus, "--table": fleet.table, "--shared-cores": fleet.shared_cores}
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
        "LOCAL_RANK": str(fleet.local_rank(rank)),
        "WORLD_SIZE": str(len(fleet.names)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",  # GPUs of one host only find each other there
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def _wait(fleet: Fleet, children: Sequence[Process], folder: Path) -> None:
    """Wait for all; the first that fails ends the wait, since the others would wait for it."""
    patience_s = fleet.deadline_s * max(1.0, crowding())
    seen, since, start = _progress(folder), time.monotonic(), time.monotonic()
    waiting = dict(enumerate(children))
    while waiting:
        for rank, child in list(waiting.items()):
            try:
                code = child.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            if code:
                raise _failure(fleet, f"ended with code {code}", folder, rank, code="BX1508")
            del waiting[rank]
        now = _progress(folder)
        if now != seen:
            seen, since = now, time.monotonic()
        waited_s, whole_s = time.monotonic() - since, time.monotonic() - start
        if waiting and (waited_s > patience_s or whole_s > _MOST_DEADLINES * patience_s):
            what = f"did not get on for {waited_s:.0f} s, {whole_s:.0f} s after the start"
            raise _failure(fleet, what, folder, min(waiting), code="BX1509")


def _progress(folder: Path) -> frozenset[tuple[str, int]]:
    """Return what changes whenever a worker gets on."""
    signs = [*folder.glob(f"*{ALIVE}"), *folder.glob("*.log")]  # of those far away, what they print
    return frozenset((path.name, path.stat().st_mtime_ns) for path in signs)


def crowding() -> float:
    """Return how many processes want each core of this host now; one or less is a quiet host."""
    return os.getloadavg()[0] / usable_cores()


def _failure(fleet: Fleet, what: str, folder: Path, rank: int, *, code: str) -> BigBrainError:
    text = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip(" .")]
    if (told := told_error(lines[-1] if lines else "")) is not None:
        return told
    is_gpu = fleet.kinds[rank] == "cuda"
    process = f"process of GPU {fleet.local_rank(rank)}" if is_gpu else f"process {rank}"
    if len(set(fleet.hosts)) > 1:
        process = f"{process} on {fleet.hosts[rank]}"
    spared = "`--kind cpu` leaves GPUs alone; " if is_gpu else ""
    by_hand = "`bigbrain-fx init` writes a cluster.json to fill in by hand"
    return ProbeError(
        f"the probe's {process} {what}",
        code=code,
        notes=tuple(lines[-_TAIL_LINES:]),
        help=f"{_reason(fleet)}; {spared}{by_hand}",
    )


def _reason(fleet: Fleet) -> str:
    """Say what may be wrong with this host, the likely first."""
    if len(set(fleet.hosts)) > 1:
        return f"do the hosts reach each other at {', '.join(dict.fromkeys(fleet.hosts))}?"
    load, cores = os.getloadavg()[0], usable_cores()
    if load > _BUSY * cores:
        return f"this host is busy (load {load:.0f} on {cores} cores): probe it when it is quiet"
    return "is the loopback interface `lo` up, and is there memory for the processes?"


def _end(child: Process) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
