"""Report on a process that failed, and warnings of a run without a supervisor.

The report has the process, its end, the end of its log, and a remedy. A commit that is missed ends
no training: its warning is read from the log of the process that leads, before it is too late.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.supervisor import last_lines, of_abort, status

BAD_INPUT = 2  # exit code of a bundle's process whose data cannot be used
PEER_LOST = 75  # and of one that ended because another was gone
SHORT = (
    "see that this host has memory, files (`ulimit -n`), threads (`ulimit -u`) and disk left, and "
    "run it again"
)
NOT_FINITE = 65  # and of one whose loss or gradients are not finite
OF_BUNDLE = re.compile(
    r"No module named '(runtime|supervisor|training|functions|model_blocks|device_\w+)[.']"
)
SHOWN = re.compile(r"error(\[(?P<code>BX\w+)\])?: ")  # how a process's last line begins
NOT_SAVED = 73  # and of one that could not write the files of --save
OF_LIMITS = (71, 74)  # and of one that has met a limit of the system
TAKEN_OVER = 77  # and of one whose commits are another run's, or were gone back behind


class RunError(BigBrainError):
    """Report a device's process that failed: which, how, and the end of its log."""

    exit_code = 1


class DeviceLostError(RunError):
    """Report a run that ended because the processes of one device keep dying; others could go on.

    Attributes:
        device: its name.
        left_out: devices that the run had gone on without before.
    """

    device: str = ""
    left_out: tuple[str, ...] = ()


def failure(
    what: str,
    code: int,
    log: Path,
    program: str,
    reason: str | None = None,
    text: str | None = None,
    *,
    is_short: bool = False,
) -> BigBrainError:
    """Return what to tell of a process that failed: the end of its log, and what to do.

    `text`: its own last word, where the log could not be written; `is_short`: this host gave no
    process.
    """
    tail = last_lines(log) or tuple(filter(None, (text,)))
    if tail and OF_BUNDLE.search(tail[-1]):
        tail = tail[-1:]  # the lines before it are not the user's
    if code == BAD_INPUT and tail:
        return _refused(tail[-1], log)
    return RunError(
        what if reason is None else f"{what}: {reason}",
        code="BX3050",
        at=str(log),
        notes=tail,
        help=_missing(tail[-1] if tail else "")
        or (SHORT if is_short else None)
        or _own_word(code, tail)
        or of_abort(code, tail)
        or _advice(code, program),
    )


def _refused(line: str, log: Path) -> InputError:
    """Return the error that a process has printed, with the code that it has there."""
    shown = SHOWN.match(line)
    last = line[shown.end() :] if shown else line
    help_ = _missing(last) or _mending(last)
    if shown is None or shown["code"] is None:
        return InputError(last, code="BX3049", at=str(log), help=help_)
    return InputError(last, code=shown["code"], at=str(log), help=help_)


def _mending(last: str) -> str:
    """Return what to do where a process refused its input."""
    if "batches(seed) fails" in last:
        return "mend the data that it reads, and run again; or batches(), and split again"
    if "batches(seed) ended" in last:
        return (
            "give --steps what it has; or let batches() go on, `for epoch in itertools.count():`, "
            "and split again"
        )
    if "expected whole batches" in last:
        return "give so many rows, in batches() or in the file of --inputs"
    if "`split --opaque CLASS`" in last:
        return "change these lines of the model file so, or the data, and split again"
    if "batch" in last:
        return "every batch must be like example_batch(): mend batches() and split again"
    return "mend what it names, and run it again"


def _missing(last: str) -> str | None:
    """Return what to do where a process found no file or module that the user's code names."""
    if "FileNotFoundError: " in last:
        return (
            "in a bundle, `__file__` and the working directory are in its own folder: copy the "
            "file to where it was looked for, or let the model file name it by its full path"
        )
    if OF_BUNDLE.search(last):
        return "a file of the bundle is missing: copy the bundle again, or split again"
    if "ModuleNotFoundError: " in last:
        return "install it into this Python, or run with PYTHONPATH=the folder that it is in"
    return None


def _own_word(code: int, tail: tuple[str, ...]) -> str | None:
    """Return what to do where a process said why it cannot go on, and was ended then."""
    if code in (1, -signal.SIGKILL) and tail and SHOWN.match(tail[-1]):
        return "do what its last line says, and run it again"
    return None


def _advice(code: int, program: str) -> str:
    if code == NOT_FINITE:
        return "lower the learning rate, or run with --on-nan skip to leave such updates out"
    if code == NOT_SAVED:
        return (
            "all steps were done: with --checkpoint-dir, give another --save and --resume, and no "
            "step is "
            "done again"
        )
    if code == TAKEN_OVER:
        return "run it with --resume to go on from its checkpoints, once no other run writes there"
    if code in OF_LIMITS:
        return "do what its last line says, and run it again"
    if code == PEER_LOST:
        return (
            "another device's process is stuck, slow or gone: see the logs beside this one; "
            "--deadline SECONDS says how long a message is waited for"
        )
    if code == -signal.SIGKILL:
        return (
            "Linux ends a process so when memory runs out (`dmesg` tells): give its device less "
            '"memory" in cluster.json and split again; run it again if someone else ended it'
        )
    return f"run `python {program} --in-process` in the bundle to see it in one process"


class LogWarnings:
    """Pass on what a device's log says of commits: events, as JSON; of misses in a row the first.

    A bundle of an older bigbrain-fx has sentences, of which each warning is passed on.
    """

    def __init__(self, log: Path, device: str, say: Callable[[str], None]) -> None:
        self.log = log
        self.say = say
        self._warning = re.compile(rf"{re.escape(device)}: ((?:WARNING|warning): .*)")
        self._read = 0  # bytes

    def look(self) -> None:
        """Read what has been written since the last look; a log that is gone says nothing."""
        new = b""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            text = self._told(line)
            if text is not None:
                self.say(text)

    def _told(self, line: str) -> str | None:
        """Return what people are told of a line; None: nothing."""
        if not line.startswith('{"event": '):
            found = self._warning.fullmatch(line)
            return None if found is None else found[1]
        try:
            return status({"generation": -1, **json.loads(line)})
        except (ValueError, KeyError):  # the user's own print
            return None
