"""`run --trace`: what the processes of a run noted, written beside its forecast when it has ended.

However a run ends, what was noted until then is written; before it starts, the forecast alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bigbrain_fx.bundles.launch.program import NOTES
from bigbrain_fx.core import Slice
from bigbrain_fx.errors import os_error_as
from bigbrain_fx.plan import MeasuredRun, Plan, report, run_trace, typical_step
from bigbrain_fx.supervisor import Event, status, warn
from bigbrain_fx.weights import replace_file

NS = 1e-9


class RunTrace:
    """The trace of one run: a file, which is whole JSON at any time."""

    def __init__(self, plan: Plan, bundle: Path, path: Path, logs: Path) -> None:
        self.plan, self.bundle, self.path = plan, bundle, path
        self.notes = logs / NOTES
        self.events: list[Event] = []

    def hear_event(self, event: Event) -> None:
        """Something has happened to a process."""
        self.events.append(event)

    def begin(self) -> None:
        """Make the folder of the notes, and write the forecast.

        Raises:
            InputError: it cannot be written.
        """
        help_ = "give --trace a file in a folder that can be written to"
        with os_error_as("the trace cannot be written", code="BX3082", at=self.path, help=help_):
            self.notes.mkdir(parents=True, exist_ok=True)
            for old in self.notes.iterdir():
                old.unlink()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(MeasuredRun((), {}))

    def end(self) -> None:
        """Write what was noted, and draw a step of it in the bundle's report."""
        measured = read_notes(self.notes, self.events)
        step = typical_step(measured, self.plan.stages.devices)
        try:
            self._write(measured)
            if step is not None:
                replace_file(self.bundle / "report.html", report(self.plan, step).encode())
        except OSError as error:
            warn(f"WARNING: the trace is not whole: {error.filename}: {error.strerror or error}")

    def _write(self, measured: MeasuredRun) -> None:
        about = {"bundle": str(self.bundle.resolve()), "devices": self.plan.stages.devices}
        whole = {"traceEvents": run_trace(self.plan, measured), "otherData": about}
        replace_file(self.path, (json.dumps(whole) + "\n").encode())


@contextmanager
def traced(plan: Plan, bundle: Path, path: Path | None, logs: Path) -> Iterator[RunTrace | None]:
    """Keep a trace of the run that is within, however it ends; without a path, none.

    Raises:
        InputError: it cannot be written.
    """
    if path is None:
        yield None
        return
    trace = RunTrace(plan, bundle, path, logs)
    trace.begin()
    try:
        yield trace
    finally:
        trace.end()


def read_notes(folder: Path, events: list[Event]) -> MeasuredRun:
    """Read what processes noted, in seconds since the first note; `observer` has the form."""
    found = [_NotesFile(path) for path in sorted(folder.iterdir())]
    zero_s = min((own.first_s for own in found if own.bars), default=0.0)
    last_s = max((own.last_s for own in found if own.bars), default=0.0)
    to_monotonic_s = time.time() - time.monotonic()
    died_s = {e.get("pid"): float(e["time"]) - to_monotonic_s for e in events if _is_end(e)}
    bars = [bar for own in found for bar in own.closed(zero_s, died_s.get(own.pid, last_s))]
    held: dict[str, list[tuple[float, int]]] = {}
    for own in found:
        entries = [(when_s - zero_s, nbytes) for when_s, nbytes in own.held]
        held.setdefault(own.device, []).extend(entries)
    after_s = to_monotonic_s + zero_s
    marks = [(float(e["time"]) - after_s, said) for e in events if (said := status(e))]
    ordered = sorted(bars, key=lambda bar: (bar.start_s, -bar.end_s))
    known = {name: tuple(sorted(entries)) for name, entries in held.items() if entries}
    return MeasuredRun(tuple(ordered), known, (*marks,))


def _is_end(event: Event) -> bool:
    return bool(event["event"] == "died")


class _NotesFile:
    """One file of notes; what a process was writing when it was killed is left out."""

    def __init__(self, path: Path) -> None:
        self.device, self.pid = "", -1
        self.bars: list[list[object]] = []  # what, start_s, end_s or None
        self.held: list[tuple[float, int]] = []
        self.first_s = self.last_s = 0.0
        self.open: list[list[object]] = []
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError, IndexError, RecursionError):
                self._take(*json.loads(line))

    def _take(self, kind: str, *facts: object) -> None:
        if kind == "device":
            self.device, self.pid = str(facts[0]), int(str(facts[1]))
        elif kind == "begin":
            self._at(facts[1])
            self.bars.append([facts[0], self.last_s, None])
            self.open.append(self.bars[-1])
        else:
            self._at(facts[0])
            self.open.pop()[2] = self.last_s
            if isinstance(facts[1], int):
                self.held.append((self.last_s, facts[1]))

    def _at(self, ns: object) -> None:
        assert isinstance(ns, int)
        self.last_s = ns * NS
        self.first_s = self.first_s or self.last_s

    def closed(self, zero_s: float, ended_s: float) -> Iterator[Slice]:
        """Yield the bars; those without an end go on to the process's."""
        for what, start_s, end_s in self.bars:
            assert isinstance(start_s, float)
            until_s = end_s if isinstance(end_s, float) else max(ended_s, start_s)
            yield Slice(self.device, str(what), start_s - zero_s, until_s - zero_s)
