"""One run of a bundle with faults, from its start to its last process, within a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bigbrain_fx.supervisor import Event

POLL_S = 0.005
GONE_S = 10.0  # longest wait for processes that were killed

Facts = dict[str, Any]
During = Callable[["Live"], None]


class LateError(RuntimeError):
    """Report a run that did not end within its deadline."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        code: of the launcher, negative for a signal; `said`: what it wrote, and its processes.
        struck: when each fault struck (seconds since 1970), by its number.
        lines: what each process did, by (device, pid): an entry for every step.
        orphans: processes that were still there after the launcher had ended.
        started_s, ended_s: since 1970.
    """

    folder: Path
    code: int
    said: str
    events: tuple[Event, ...]
    struck: Mapping[int, float]
    lines: Mapping[tuple[str, int], Sequence[Facts]]
    losses: Mapping[int, float]
    orphans: tuple[int, ...]
    started_s: float
    ended_s: float
    facts: Facts = field(default_factory=dict)

    def of(self, event: str) -> list[Event]:
        """Return all events of a name."""
        return [entry for entry in self.events if entry["event"] == event]

    @cached_property
    def hashes(self) -> dict[str, dict[str, str]]:
        """SHA-256 of parameters, optimizer state and the rest, by device, after the last step."""
        return {
            device: line["hashes"]
            for (device, _), lines in sorted(self.lines.items())
            for line in lines
            if "hashes" in line
        }

    def step_times(self) -> list[float]:
        """Return the seconds that each reported step took, but for the first two."""
        lines = [line for line in read_lines(self.folder / "said.txt") if "step_s" in line]
        return [float(line["step_s"]) for line in lines][2:]

    @property
    def leftovers(self) -> list[Path]:
        """Return the temporary files that are still there."""
        return [path for path in self.folder.rglob("*.tmp") if path.is_file()]


@dataclass
class Live:
    """A run under way: what a driver may look at, and the launcher's process."""

    folder: Path
    process: subprocess.Popen[bytes]
    until: float
    facts: Facts = field(default_factory=dict)

    @property
    def faults(self) -> Path:
        """Return the folder in which processes write what they do."""
        return self.folder / "bundle" / "faults"

    def events(self) -> list[Event]:
        """Return the events until now."""
        return read_lines(self.folder / "events.jsonl")

    def pid(self, device: str) -> int:
        """Return the process that was last seen to be a device."""
        return int((self.faults / f"pid-{device}").read_text())

    def pids(self) -> tuple[int, ...]:
        """Return the processes of its devices and spares: those that we started, and no others."""
        return _pids(self)

    def wait_for(self, is_so: Callable[[], bool], what: str) -> float:
        """Wait until something is so; return when that was.

        Raises:
            LateError: the deadline has passed, or the run has ended without it.
        """
        while not is_so():
            if self.process.poll() is not None:
                raise LateError(f"the run ended before {what}")
            if time.monotonic() > self.until:
                raise LateError(f"no {what} within the deadline")
            time.sleep(POLL_S)
        return time.time()

    def wait_struck(self, number: int) -> float:
        """Wait until a fault has struck; return when."""
        path = self.faults / f"struck-{number}"
        self.wait_for(path.exists, f"fault {number}")
        return float(path.read_text())

    def wait_event(self, name: str, count: int = 1) -> float:
        """Wait until an event has happened so often."""
        return self.wait_for(
            lambda: sum(e["event"] == name for e in self.events()) >= count, f"event {name}"
        )


def launch_words(steps: int, *more: str, spares: int = 1, hang_s: float = 20.0) -> tuple[str, ...]:
    """Return what starts a supervised run, in its bundle."""
    ours = ("--spares", str(spares), "--hang", str(hang_s), "--json")
    files = ("--events", "../events.jsonl", "--logs", "../logs")
    return (sys.executable, "launch.py", *ours, *files, "--steps", str(steps), *more)


def run_job(
    folder: Path,
    words: Sequence[str],
    deadline_s: float,
    during: During | None = None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run a program in `folder/bundle` to its end; no process outlives this call.

    Args:
        folder: holds the bundle; takes logs and events.
        words: the program; it leads a process group of its own.
        deadline_s: after this everything is killed.
        during: acts while it runs, and must wait for what it expects.
        environment: more than our own.

    Raises:
        LateError: it did not end in time.
    """
    (folder / "logs").mkdir(exist_ok=True)
    started_s, until = time.time(), time.monotonic() + deadline_s
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            words,
            cwd=folder / "bundle",
            env={**plain, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell that starts this tool in the background ignores SIGINT for all of it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    live = Live(folder, process, until)
    try:
        if during is not None:
            during(live)
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise LateError(f"not ended within {deadline_s:g} s\n{_tail(folder)}") from None
        ended_s = time.time()
        orphans = still_running(_pids(live), 0.5)
    except LateError as error:
        raise LateError(f"{error}\n{_tail(folder)}") from None
    finally:
        end(process, _pids(live))
    return _gathered(live, started_s, ended_s, orphans)


def end(process: subprocess.Popen[bytes], pids: Sequence[int]) -> None:
    """Kill a launcher and its processes by their ids, and wait until they are gone."""
    if process.poll() is None:
        process.kill()
        process.wait(GONE_S)
    for pid in still_running(pids, 1.0):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = still_running(pids, GONE_S)
    if left:
        raise RuntimeError(f"processes {left} cannot be ended")


def still_running(pids: Sequence[int], patience_s: float) -> tuple[int, ...]:
    """Return those of these processes that are there after so long; zombies are gone."""
    until = time.monotonic() + patience_s
    while (left := tuple(filter(is_running, pids))) and time.monotonic() < until:
        time.sleep(POLL_S)
    return left


def is_running(pid: int) -> bool:
    """Whether a process of ours runs, or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_lines(path: Path) -> list[Facts]:
    """Read JSON lines; a last one that is being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _pids(live: Live) -> tuple[int, ...]:
    started = {int(e["pid"]) for e in live.events() if e["event"] == "started"}
    seen = {int(p.stem.rpartition("-")[2]) for p in live.faults.glob("*-*.jsonl")}
    return tuple(sorted(started | seen))


def _tail(folder: Path) -> str:
    """Return the ends of what was said, to find out why a run was late."""
    files = [folder / "said.txt", *sorted((folder / "logs").glob("*.log"))]
    texts = [f"--- {f.name}\n{f.read_text(errors='replace')[-600:]}" for f in files if f.exists()]
    events = "\n".join(map(json.dumps, read_lines(folder / "events.jsonl")[-12:]))
    return "\n".join((*texts, f"--- events\n{events}"))


def _gathered(live: Live, started_s: float, ended_s: float, orphans: tuple[int, ...]) -> Run:
    said = (live.folder / "said.txt").read_text(errors="replace")
    logs = [f.read_text(errors="replace") for f in sorted((live.folder / "logs").glob("*.log"))]
    steps = [line for line in read_lines(live.folder / "said.txt") if "loss" in line]
    lines = {}
    for path in live.faults.glob("*-*.jsonl"):
        device, _, pid = path.stem.rpartition("-")
        lines[device, int(pid)] = read_lines(path)
    return Run(
        live.folder,
        live.process.returncode,
        "\n".join((said, *logs)),
        tuple(live.events()),
        {int(p.name[7:]): float(p.read_text()) for p in live.faults.glob("struck-*")},
        lines,
        {int(line["step"]): float(line["loss"]) for line in steps},
        orphans,
        started_s,
        ended_s,
        live.facts,
    )
