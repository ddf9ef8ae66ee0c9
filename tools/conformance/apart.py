"""Parts of a tool's work, each in a copy of this process; what they answer is plain data.

Capture, too: its child is then this copy, which has imported torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from bigbrain_fx.bundles import CAPTURE_CHILD
from bigbrain_fx.core import Timing
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.child import service_of
from bigbrain_fx.frontend.client import Child, Message, Task
from bigbrain_fx.verification.rehearsal import Rehearsal

DEADLINE_S = 120.0


class Here:
    """A capture session's child in this process, itself a fork."""

    spent: tuple[Timing, ...] = ()  # as a child's: nothing is measured here

    def __init__(self, task: Task, wanted: Mapping[str, object]) -> None:
        self._rehearsal = Rehearsal() if task.module == CAPTURE_CHILD else None
        with warnings.catch_warnings():  # model() may set filters, which its own process keeps
            self._service = service_of(wanted)
            self._filters = list(warnings.filters)

    def answer(self) -> Message:
        """Return what was captured."""
        return _plain(self._service.report())

    def ask(self, request: Mapping[str, object]) -> Message:
        """Serve a request."""
        with warnings.catch_warnings():
            warnings.filters[:] = self._filters  # type: ignore[index]  # a list
            if request["do"] == "rehearse" and self._rehearsal is not None:
                return _plain(self._rehearsal.compare(self._service, request))
            return _plain(self._service.serve(request))

    def close(self) -> None:
        """There is nothing to end."""


def child_here(task: Task, wanted: Mapping[str, object]) -> Here | Child:
    """Start what captures: here, or in a new process where a trace was tried here before.

    A step that runs as the user wrote it finds everything as Python starts.
    """
    tried = "refusal" in wanted or wanted["apart"]
    return Child(task, wanted) if tried else Here(task, wanted)


def _plain(message: Mapping[str, object]) -> Message:
    """Return what would come over a pipe."""
    found: Message = json.loads(json.dumps(message))
    return found


def apart(work: Callable[[], Mapping[str, str]], folder: Path) -> Mapping[str, str]:
    """Run in a copy of this process, under a deadline; an error becomes a status."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _answer(work, answer, folder / "said")
    status = _waited(pid)
    if not answer.exists():
        return {"status": "crash", "detail": f"its process ended with {status}"}
    found: Mapping[str, str] = json.loads(answer.read_text())
    return found


def _answer(work: Callable[[], Mapping[str, str]], answer: Path, log: Path) -> None:
    """Be the process, to its end."""
    os.setsid()
    signal.alarm(int(DEADLINE_S))
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    _forget_others()
    try:
        found = work()
    except BigBrainError as error:
        found = _refused(error)
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        found = {"status": "crash", "detail": f"{type(error).__name__}: {first}\n{where}"}
    answer.write_text(json.dumps(dict(found)))
    os._exit(0)


def _forget_others() -> None:
    """Forget inherited model files and bundles: a bundle imports its own files by such names."""
    others = [name for name, module in sys.modules.items() if _is_of_others(module)]
    for name in others:
        del sys.modules[name]


def _is_of_others(module: object) -> bool:
    """Whether a module is a model file, or of neither this repository nor an installation."""
    file = getattr(module, "__file__", None)
    is_ours = not file or any(Path(file).is_relative_to(place) for place in _OURS)
    return not is_ours or hasattr(module, "__bigbrain_fx__")


_OURS = (Path(__file__).resolve().parents[2], sys.prefix, sys.base_prefix)


def _refused(error: BigBrainError) -> Mapping[str, str]:
    detail = f"{error.what} ({error.at})" + "".join(f"\n  note: {note}" for note in error.notes)
    status = "refused" if error.help else "useless"
    return {"status": status, "detail": detail, "help": error.help or ""}


def _waited(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the model file may have started
    return os.waitstatus_to_exitcode(status)
