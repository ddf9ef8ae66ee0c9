"""The processes of one run, none of which is replaced: their start, messages and end."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bigbrain_fx.bundles.launch.failures import BAD_INPUT, PEER_LOST, LogWarnings, failure
from bigbrain_fx.bundles.launch.options import BatchLine, Line, RunOptions, StepLine
from bigbrain_fx.bundles.launch.process import Command, Process, Spawn, users_environment
from bigbrain_fx.bundles.launch.program import arguments, command_of, entry, reporter
from bigbrain_fx.plan import Plan
from bigbrain_fx.supervisor import EventLog, warn

POLL_S = 0.1
LOOK_S = 0.5  # between two looks into the log
GRACE_S = 5.0


@dataclass
class PlainCrew:
    """The processes of one run, by device."""

    processes: dict[str, Process]
    logs: Path
    reporter: str
    program: str
    events: EventLog = field(default_factory=lambda: EventLog(None))
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    warnings: LogWarnings | None = None
    looked: float = 0.0  # into the leading process's log, on a monotonic clock

    def watch(self, on_line: Callable[[Line], None]) -> Iterator[Line]:
        """Yield steps or batches as they are reported, until all processes have ended well."""
        stdout = self.processes[self.reporter].stdout
        assert stdout is not None
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()
        at_end = False
        while not at_end or any(p.poll() is None for p in self.processes.values()):
            self._require_alive()
            self._look_at_log()
            try:
                line = self.lines.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if line is None:
                at_end = True
                continue
            found = _line(line)
            if found is None:  # the user's batches() or optimizer() printed it
                warn(line.rstrip("\n"))
                continue
            on_line(found)
            yield found
        self._require_alive()
        self._look_at_log(within_s=0.0)
        self.events.write("finished", 0)

    def _look_at_log(self, within_s: float = LOOK_S) -> None:
        if self.warnings is not None and time.monotonic() - self.looked >= within_s:
            self.looked = time.monotonic()
            self.warnings.look()

    def stop(self) -> None:
        """End every process that still runs, by its id: first politely."""
        running = [p for p in self.processes.values() if p.poll() is None]
        for process in running:
            process.terminate()
        until = time.monotonic() + GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _read(self, stdout: IO[str]) -> None:
        try:
            with stdout:
                for line in stdout:
                    self.lines.put(line)
        finally:
            self.lines.put(None)

    def _require_alive(self) -> None:
        failed = self._failed()
        if not failed:
            return
        name, code = self._cause(failed)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        what = f"the process of device {name} {how}"
        self.events.write("died", 0, device=name, pid=_pid(self.processes[name]), step=-1, how=how)
        self.events.write("failed", 0, device=name, text=what)
        raise failure(what, code, self.logs / f"{name}.log", self.program)

    def _failed(self) -> dict[str, int]:
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code}

    def _cause(self, failed: dict[str, int]) -> tuple[str, int]:
        """Return who failed first: a process may hear of a peer's end before that has ended."""
        until = time.monotonic() + GRACE_S
        while set(failed.values()) == {PEER_LOST} and time.monotonic() < until:
            running = [p for p in self.processes.values() if p.poll() is None]
            if not running:
                break
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(POLL_S)
            failed = self._failed()
        rank = {BAD_INPUT: 0, PEER_LOST: 2}
        return min(failed.items(), key=lambda entry: rank.get(entry[1], 1))


def _pid(process: Process) -> int | None:
    """Return its number, where it is one of this host."""
    found: int | None = getattr(process, "pid", None)
    return found


def _line(text: str) -> Line | None:
    for kind in (StepLine, BatchLine):
        try:
            return kind(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            continue
    return None


@contextmanager
def processes(
    plan: Plan,
    bundle: Path,
    options: RunOptions,
    port: int,
    logs: Path,
    spawn: Spawn,
    events: EventLog,
) -> Iterator[PlainCrew]:
    """Start a process for every device of a plan; end all of them, whatever happens."""
    reports = reporter(plan)
    crew = PlainCrew({}, logs, reports, entry(plan), events)
    leader = plan.stages.devices[0]
    crew.warnings = LogWarnings(logs / f"{leader}.log", leader, warn)
    started = (*command_of(plan, options, logs), "--json", *arguments(options, logs))
    try:
        for rank, name in enumerate(plan.stages.devices):
            around, log = environment(plan, rank, port), logs / f"{name}.log"
            command = Command(name, started, bundle, around, log, name == reports)
            crew.processes[name] = spawn(command)
            events.write("started", 0, device=name, pid=_pid(crew.processes[name]))
        yield crew
    finally:
        crew.stop()


def environment(plan: Plan, rank: int, port: int) -> dict[str, str]:
    """Return the environment of a process of this host: its name, and where the others are."""
    device = plan.cluster.device[plan.stages.devices[rank]]
    ours = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(plan.stages.devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(device.threads),
        "PYTHONUNBUFFERED": "1",
    }
    return {**users_environment("TORCHELASTIC_USE_AGENT_STORE"), **ours}
