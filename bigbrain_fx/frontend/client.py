"""A child process with torch, for its parent: start, requests, deadline and end.

One JSON object a line each way; `service` is the other end. The parent imports no torch, and the
user's code runs in the child only, with its prints on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bigbrain_fx.core import Timing
from bigbrain_fx.errors import BigBrainError, InputError, from_fields
from bigbrain_fx.supervisor import OUTLIVING

Message = dict[str, object]
BEGINNING = "bigbrain_fx.frontend.beginning"
_PACKAGES = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Task:
    """Task of a child process, in the words of its error messages.

    Attributes:
        module: the program, run as `python -P -m`.
        name: "capture", for reports of a fault of bigbrain_fx itself.
        slow: the step that took longer than `limit_s`, with a place for the limit: "{} to load".
        slow_help, ended_help: remedies when it takes too long, or ends by itself.
        limit_s: seconds for each answer.
        subject: the file at fault when the process ends: "model.py".
        at: the place of that file.
        libraries: packages that the program needs beside torch, such as "onnx".
    """

    module: str
    name: str
    slow: str
    slow_help: str
    ended_help: str
    limit_s: float
    subject: str = "the model"
    at: str | None = None
    libraries: tuple[str, ...] = ()


class EndedError(InputError):
    """Report that a child's process ended by itself: user's code, or a kernel of torch, did it.

    Attributes:
        how: "signal SIGSEGV".
    """

    how: str = ""


class Lines:
    """The lines of a pipe, each waited for until a time."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._rest = pipe, b""

    def next(self, deadline_s: float | None = None) -> bytes | None:
        """Return the next line; None when there will be none.

        Raises:
            TimeoutError: there is none by then.
        """
        while b"\n" not in self._rest:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([self._pipe], [], [], left_s)[0]:
                raise TimeoutError
            data = os.read(self._pipe, 65536)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Child:
    """The process of a task. Use it as a context manager, or call `close`.

    Args:
        task: of the process.
        wanted: its argument; must be JSON.
        threads: number that torch computes with; None: the environment decides.

    Attributes:
        spent: seconds of its answers.
    """

    def __init__(
        self, task: Task, wanted: Mapping[str, object], threads: int | None = None
    ) -> None:
        self._task = task
        self.spent: list[Timing] = []
        # -P: the working directory must not shadow modules of the child.
        program = f"{task.module}:{','.join(task.libraries)}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", BEGINNING, program, json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(threads),
            start_new_session=True,  # whatever the model file starts ends with it
        )
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdout.fileno())
        OUTLIVING.add(self._process.pid)

    def ask(self, request: Mapping[str, object]) -> Message:
        """Send a request and wait for its answer; raises as `answer` does."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: it may have said why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Message:
        """Wait for the next message.

        Raises:
            InputError: the process took too long.
            EndedError: it ended.
            BigBrainError: what the child reports, under the class that it had there.
        """
        line = self._line(time.monotonic() + self._task.limit_s)
        if line is None:
            raise self._ended()
        return self._read(line)

    def messages(self) -> Iterator[Message]:
        """Yield the child's messages until it ends, within one limit; raise as `answer`."""
        deadline_s = time.monotonic() + self._task.limit_s
        while (line := self._line(deadline_s)) is not None:
            yield self._read(line)
        if self._process.wait() != 0:
            raise self._ended()

    def _read(self, line: bytes) -> Message:
        message = cast("Message", json.loads(line))
        if "internal" in message:
            told = f"{self._task.name} failed in its child process"
            raise RuntimeError(f"{told}\n{message['internal']}")
        if "error" in message:
            raise from_fields(cast("Message", message["error"]))
        self._note(cast("list[Any]", message.pop("spent", [])))
        return message

    def _note(self, spent: list[Any]) -> None:
        """Note the time of an answer, without the idle time before a request."""
        laps = [Timing(**each) for each in spent]
        self.spent += laps[1:] if self.spent else laps

    def _line(self, deadline_s: float) -> bytes | None:
        """Return the next message; None when there will be none.

        Code that Python itself runs as it starts (sitecustomize, .pth files) may print before the
        child reserves its stdout for messages. That output is shown, as all prints are.
        """
        try:
            while (line := self._lines.next(deadline_s)) is not None and not line.startswith(b"{"):
                print(line.decode(errors="replace"), file=sys.stderr, flush=True)
        except TimeoutError:
            raise self._too_slow() from None
        return line

    def _too_slow(self) -> InputError:
        self.close(at_once=True)
        task = self._task
        what = task.slow.format(f"took longer than {task.limit_s:g} s")
        return InputError(what, code="BX2031", at=task.at, help=task.slow_help)

    def _ended(self) -> EndedError:
        self.close()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        found = EndedError(
            f"{self._task.subject} ended its process ({how})",
            code="BX2032",
            at=self._task.at,
            notes=("SIGKILL often means: out of memory",) if code == -signal.SIGKILL else (),
            help=self._task.ended_help,
        )
        found.how = how
        return found

    def close(self, at_once: bool = False) -> None:
        """End the child and its own processes."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if at_once else 5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        OUTLIVING.drop(process.pid)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(at_once=kind is not None)


def told_error(line: str) -> BigBrainError | None:
    """Return the error that a line of a child process reports, if it is one."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return (
        from_fields(message["error"]) if isinstance(message, dict) and "error" in message else None
    )


def child_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a child.

    Trials call ops one by one, also on a single row. PyTorch writes its warnings of such calls
    straight to stderr, past all filters of Python. Threads of OpenMP that wait by spinning take the
    processors from other processes: on a loaded machine that tripled a capture. The user's settings
    stand.
    """
    paths = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if threads is not None else ()
    chosen = dict.fromkeys(names, str(threads))
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "passive"}
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(paths), **chosen}
