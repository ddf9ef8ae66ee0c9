"""A bundle's processes at work for a server: batches to all of them, outputs from one.

It knows processes and pipes; it knows no requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.bundles import (
    BAD_INPUT,
    GRACE_S,
    PEER_LOST,
    entry,
    environment,
    failure,
    free_port,
)
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.plan import Plan

_ENDED_BY_US = {PEER_LOST, -signal.SIGTERM}
LENGTH_BYTES = 8  # of a frame, as runtime/serving.py has it


@dataclass(frozen=True)
class SlotSpec:
    """Inputs and outputs of a bundle, as its own process reports them.

    Attributes:
        inputs: name -> element type, shape of a whole slot.
        whole: inputs that have no rows: all of a slot share them.
        outputs: name -> the dimension that has the rows; None: one value for a micro-batch.
        rows: of a slot.
    """

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    whole: tuple[str, ...]
    outputs: Mapping[str, int | None]
    rows: int

    @classmethod
    def of_json(cls, content: bytes) -> SlotSpec:
        """Read what `SlotPipes.batches` wrote."""
        found = json.loads(content)
        inputs = {name: (dtype, tuple(shape)) for name, (dtype, shape) in found["inputs"].items()}
        return cls(inputs, tuple(found["whole"]), found["outputs"], found["rows"])


class ServingCrew:
    """One process for each device, from start to stop; its pipes are ours.

    Attributes:
        spec: known once all devices are there.
    """

    def __init__(self, plan: Plan, bundle: Path, logs: Path, deadline_s: float) -> None:
        self.plan, self.logs = plan, logs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ways: dict[str, _FrameQueue] = {}
        self._stopping = threading.Event()
        self._port = free_port()
        self.source, sink = os.pipe()
        try:
            for rank, name in enumerate(plan.stages.devices):
                self._start(rank, name, bundle, sink, deadline_s)
        except BaseException:
            self.stop()
            self.close()
            raise
        finally:
            os.close(sink)

    def _start(self, rank: int, name: str, bundle: Path, sink: int, deadline_s: float) -> None:
        ours, theirs = os.pipe()
        words = [sys.executable, entry(self.plan), "--serve", f"{ours},{sink}"]
        try:
            with (self.logs / f"{name}.log").open("w") as log:
                self.processes[name] = subprocess.Popen(
                    [*words, "--deadline", str(deadline_s)],
                    cwd=bundle,
                    env=environment(self.plan, rank, self._port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(ours, sink),
                )
        except BaseException:
            os.close(theirs)
            raise
        finally:
            os.close(ours)
        self._ways[name] = _FrameQueue(theirs)
        process = self.processes[name]
        threading.Thread(target=self._watch, args=(process,), daemon=True, name="watch").start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """End the others when one dies: those that wait for a batch would not hear of it."""
        if process.wait() and not self._stopping.is_set():
            for other in self.processes.values():
                if other.poll() is None:
                    other.terminate()

    def hello(self, until: float) -> SlotSpec:
        """Wait until all devices have their weights and have met.

        Raises:
            BigBrainError: a process ended, or `until` (of the monotonic clock) has passed.
        """
        said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=lambda: said.put(self.receive()), daemon=True).start()
        try:
            found = said.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise InputError(
                "the devices were not ready in time",
                code="BX3113",
                at=str(self.logs),
                help="give more --deadline",
            ) from None
        if found is None:
            raise self.failure()
        return SlotSpec.of_json(found)

    def send(self, frame: bytes) -> None:
        """Give every device the next batch; they read it when they get to it."""
        for way in self._ways.values():
            way.frames.put(frame)

    def receive(self) -> bytes | None:
        """Wait for the outputs of the next batch; None when no process is left to send any."""
        length = self._read(LENGTH_BYTES)
        return None if length is None else self._read(int.from_bytes(length, "little"))

    def _read(self, count: int) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            piece = os.read(self.source, count - len(found))
            if not piece:
                return None
            found += piece
        return bytes(found)

    def failure(self) -> BigBrainError:
        """Return what to tell of the process that failed first."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and not set(self._codes().values()) - _ENDED_BY_US:
            running = next((p for p in self.processes.values() if p.poll() is None), None)
            if running is None:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(0.1)
        codes = self._codes() or {next(iter(self.processes)): 0}
        rank = {BAD_INPUT: 0, PEER_LOST: 2, -signal.SIGTERM: 3}
        name, code = min(codes.items(), key=lambda each: rank.get(each[1], 1))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        log = self.logs / f"{name}.log"
        return failure(f"the process of device {name} {how}", code, log, entry(self.plan))

    def _codes(self) -> dict[str, int]:
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code}

    def stop(self) -> None:
        """End every process: closed pipes say that there is no more; late processes are killed."""
        self._stopping.set()
        for way in self._ways.values():
            way.close()
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            running = [p for p in self.processes.values() if p.poll() is None]
            for process in running:
                if end is not None:
                    end(process)
            until = time.monotonic() + GRACE_S
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Give up the pipe of outputs, once nobody reads it."""
        os.close(self.source)


class _FrameQueue:
    """Frames on their way to one device: a thread writes, so that nobody waits for a full pipe."""

    def __init__(self, sink: int) -> None:
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sink = sink
        self._thread = threading.Thread(target=self._write, daemon=True, name="batches")
        self._thread.start()

    def close(self) -> None:
        self.frames.put(None)

    def _write(self) -> None:
        for frame in self._framed():
            try:
                while frame:
                    frame = frame[os.write(self._sink, frame) :]
            except OSError:  # the device is gone: whoever reads its outputs says so
                break
        os.close(self._sink)

    def _framed(self) -> Iterator[memoryview]:
        while (content := self.frames.get()) is not None:
            yield memoryview(len(content).to_bytes(LENGTH_BYTES, "little") + content)
