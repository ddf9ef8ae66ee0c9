"""A bundle under its supervisor that takes steps when told: our side of `bench_shards` with replay.

    tool ── a byte a step ──▶ go-d0, go-d1 (pipes)     launch.py ─┬─ d0 ── wait() after a step
      ▲                                                           └─ d1 ── wait()
      └──────────── said (a pipe): device, pid, its end, time, memory ─────┘

It answers as `tools.studies.peers.peer_jobs.Job` does; processor time is that of launch.py, too.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.plan import read_plan
from tools.studies.peers.peer_jobs import GRACE_S, RAISED, START_S, STEP_S, processor_s

HANG_S = 3600.0  # who waits at its gate is not hung
STEPS = 1_000_000
GATE = Path(__file__).with_name("peer_gate.py")
WORDS = ("launch.py", "--steps", str(STEPS), "--spares", "0", "--hang", str(HANG_S))


@dataclass
class Supervised:
    """The processes of a run whose devices wait at their gates."""

    launcher: subprocess.Popen[bytes]
    gates: Path
    names: tuple[str, ...]
    said: int
    go: tuple[int, ...]
    rest: bytes = b""
    own: dict[str, int] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def pids(self) -> list[int]:
        """Return the process ids, that of launch.py first."""
        return [self.launcher.pid, *self.own.values()]

    def ask(self, command: dict[str, Any], deadline_s: float) -> list[dict[str, Any]]:
        """Take so many steps; return what each device says of them."""
        before, begun = dict(self.used_s), time.monotonic()
        launcher_s = processor_s(self.launcher.pid)
        for pipe in self.go:
            os.write(pipe, b"." * command["count"])
        ends = self.hear(command["count"], deadline_s)
        launcher_s = processor_s(self.launcher.pid) - launcher_s
        answers = [self._answer(name, begun, ends[name], before[name]) for name in self.names]
        answers[0]["cpu_s"] += launcher_s
        return answers

    def _answer(self, name: str, begun: float, ends: list[float], used_s: float) -> dict[str, Any]:
        starts = [begun, *ends[:-1]]
        return {
            "step_s": [end - start for start, end in zip(starts, ends, strict=True)],
            "cpu_s": self.used_s[name] - used_s,
            "max_rss_bytes": self.peak_bytes[name],
        }

    def train(self, steps: int) -> None:
        """Take so many steps."""
        self.ask({"do": "steps", "count": steps}, STEP_S * steps)

    def gradients(self, folder: Path) -> dict[str, Tensor]:
        """Return the gradients of the first step, of all devices."""
        found: dict[str, Tensor] = {}
        for name in self.names:
            found |= load_file(self.gates / f"first-{name}")
        return found

    def hear(self, count: int, deadline_s: float) -> dict[str, list[float]]:
        """Wait until every device has ended so many steps; return when each ended.

        Raises:
            TimeoutError: a device said nothing in time.
            RuntimeError: the run has ended; its own words are on stderr.
        """
        ends: dict[str, list[float]] = {name: [] for name in self.names}
        until = time.monotonic() + deadline_s
        while any(len(each) < count for each in ends.values()):
            name, pid, end, used_s, peak = self._line(until).split()
            self.own[name], self.used_s[name], self.peak_bytes[name] = (
                int(pid),
                float(used_s),
                int(peak),
            )
            ends[name].append(float(end))
        return ends

    def _line(self, until: float) -> str:
        while b"\n" not in self.rest:
            if self.launcher.poll() is not None:
                raise RuntimeError(f"launch.py ended with {self.launcher.returncode}; see above")
            left = until - time.monotonic()
            if left < 0:
                raise TimeoutError("a device did not end its step in time")
            if select.select([self.said], [], [], min(1.0, left))[0]:
                self.rest += os.read(self.said, 4096)
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()


@contextmanager
def supervised(bundle: Path) -> Iterator[Supervised]:
    """Start a bundle under its supervisor; its first step is done when the block begins."""
    names = tuple(device.name for device in read_plan(bundle).cluster.devices)
    gates = _gated(bundle, names)
    pipes = [os.open(gates / each, os.O_RDWR) for each in ("said", *(f"go-{n}" for n in names))]
    env = {**os.environ, **RAISED, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command, quiet = [sys.executable, *WORDS], subprocess.DEVNULL
    launcher = subprocess.Popen(command, cwd=bundle, env=env, stdin=quiet, stdout=quiet)
    run = Supervised(launcher, gates, names, pipes[0], tuple(pipes[1:]))
    try:
        run.hear(1, START_S)
        yield run
    finally:
        _end(launcher, [*run.own.values()])
        for pipe in pipes:
            os.close(pipe)


def _gated(bundle: Path, names: tuple[str, ...]) -> Path:
    """Have each device wait after a step, by the hook that train.py offers; make the pipes."""
    train = bundle / "train.py"
    text = train.read_text()
    for old, new in (
        ("    on_step_end=[],", "    on_step_end=[gate.wait],"),
        ("import training\n", "import gate\nimport training\n"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    train.write_text(text)
    shutil.copy(GATE, bundle / "gate.py")
    gates = bundle / "gates"
    gates.mkdir()
    for each in ("said", *(f"go-{name}" for name in names)):
        os.mkfifo(gates / each)
    return gates


def _end(launcher: subprocess.Popen[bytes], devices: list[int]) -> None:
    """End all of them by their ids, the supervisor first: it would replace who dies."""
    launcher.kill()
    launcher.wait()
    for pid in devices:
        with suppress(ProcessLookupError):
            watch = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([watch], [], [], GRACE_S)  # readable when it has ended
            os.close(watch)
