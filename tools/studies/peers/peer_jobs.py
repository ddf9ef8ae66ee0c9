"""The processes of `bench_peer.py`: start, command, watch and end them; and who else is busy.

Every wait has a deadline, and every process is ended by its id. This file knows no statistics.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.bundles.launch import free_port

SIDE = Path(__file__).resolve().parent / "peer_side.py"
START_S = 120.0
STEP_S = 60.0  # longest that one step may take
GRACE_S = 5.0
KEEP_BYTES = 1 << 30  # what the bundle's own runtime sets
RAISED = {"MALLOC_TRIM_THRESHOLD_": str(KEEP_BYTES), "MALLOC_MMAP_THRESHOLD_": str(KEEP_BYTES)}
SAMPLE_S = 0.25


@dataclass
class Job:
    """The processes of one side, by rank; they compute only between a command and its answer."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """Return the process ids."""
        return [process.pid for process in self.processes]

    def ask(self, command: dict[str, object], deadline_s: float) -> list[dict[str, Any]]:
        """Give all processes a command; return their answers."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
        return self.answers(deadline_s)

    def answers(self, deadline_s: float) -> list[dict[str, Any]]:
        """Read one line from every process.

        Raises:
            TimeoutError: a process said nothing in time.
            RuntimeError: a process has ended; its own error is on stderr.
        """
        until = time.monotonic() + deadline_s
        return [json.loads(_read_line(process, until)) for process in self.processes]

    def train(self, steps: int) -> tuple[float, tuple[int, ...]]:
        """Train; return the median step time of the slower rank, and each rank's peak memory."""
        answers = self.ask({"do": "steps", "count": steps}, STEP_S * steps)
        slower = map(max, zip(*(answer["step_s"] for answer in answers), strict=True))
        return statistics.median(slower), tuple(answer["max_rss_bytes"] for answer in answers)

    def gradients(self, folder: Path) -> dict[str, Tensor]:
        """Return the gradients of the first step, of all ranks."""
        found: dict[str, Tensor] = {}
        for process in self.processes:
            path = folder / f"{process.pid}.safetensors"
            Job([process]).ask({"do": "gradients", "path": str(path)}, START_S)
            found |= load_file(path)
        return found


@contextmanager
def job(
    side: str, bundle: Path, schedule: str, world: int, *, raised: bool, tensors: bool = False
) -> Iterator[Job]:
    """Start one side's processes and wait until they are ready; they end with the block.

    With `tensors` they can be asked once what their tensors took at their most.
    """
    found = Job()
    port = free_port()
    try:
        for rank in range(world):
            wanted = {
                "side": side,
                "bundle": str(bundle),
                "rank": rank,
                "world": world,
                "port": port,
                "schedule": schedule,
                "deadline_s": START_S,
                "tensors": tensors,
            }
            found.processes.append(_start(json.dumps(wanted), bundle, raised))
        found.answers(START_S)
        yield found
    finally:
        _stop(found.processes)


def _start(wanted: str, bundle: Path, raised: bool) -> subprocess.Popen[bytes]:
    plain = {name: value for name, value in os.environ.items() if name not in RAISED}
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(RAISED if raised else {})}
    pipe = subprocess.PIPE
    command = [sys.executable, str(SIDE), wanted]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**plain, **ours}, cwd=bundle)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_line(process: subprocess.Popen[bytes], until: float) -> bytes:
    """Read a line; the other side writes it in one go."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
    if not ready:
        raise TimeoutError(f"process {process.pid} did not answer in time")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with {process.wait(GRACE_S)}; see above")
    return line


# --------------------------------------------------------------------------- who else is busy


@dataclass
class Meter:
    """Say which share of the processors others use while it is on (Linux; elsewhere 0)."""

    pids: Sequence[int]
    others: float = 0.0

    def __enter__(self) -> Meter:
        self.before = *_ticks(), self._own()
        return self

    def __exit__(self, *_: object) -> None:
        now = *_ticks(), self._own()
        total, idle, own = (after - before for after, before in zip(now, self.before, strict=True))
        self.others = max(0.0, (total - idle - own) / total) if total else 0.0

    def _own(self) -> int:
        fields = (_proc(f"{pid}/stat").rpartition(")")[2].split() for pid in self.pids)
        return sum(int(entry[11]) + int(entry[12]) for entry in fields if entry)


def wait_for_quiet(pids: Sequence[int], share: float, limit_s: float) -> None:
    """Wait, but not for ever, until others use no more than a share of the processors."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        with Meter(pids) as meter:
            time.sleep(SAMPLE_S)
        if meter.others <= share:
            return


def processor_s(pid: int) -> float:
    """Return the processor seconds that a process has taken until now (Linux)."""
    fields = _proc(f"{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ticks() -> tuple[int, int]:
    """Return clock ticks of all processors since boot: all, and idle."""
    numbers = [int(word) for word in _proc("stat").partition("\n")[0].split()[1:9]]
    return sum(numbers), sum(numbers[3:5])


def _proc(name: str) -> str:
    try:
        return Path("/proc", name).read_text()
    except OSError:  # not Linux
        return ""
