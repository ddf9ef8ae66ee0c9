"""What forward and loss read of the world: the clock, files, the network, other programs.

    a run, watched ─▶ Reads: "the clock" at model.py:17, the files that it opened

A trace keeps what was found there then. Runs are watched where the user's files have such words;
whoever logs is let be. This file knows Python's own functions; it knows no graphs.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from bigbrain_fx.frontend.translation.sources import is_own

CLOCK = "the clock"
_FILES, _NETWORK, _PROGRAMS = "files", "the network", "other programs"
_ENVIRONMENT, _MACHINE = "the environment, which it writes", "the machine's state"
_CACHE = "how often a cache was asked"
_OF_TIME = (
    *("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns"),
    *("clock_gettime_ns", "localtime", "gmtime", "ctime", "strftime"),
)
CLOCKS: dict[str, Callable[..., Any]] = {
    name: getattr(time, name) for name in _OF_TIME if hasattr(time, name)
}
_OF_OS = {
    _FILES: ("stat", "lstat", "access", "listdir", "scandir", "readlink", "statvfs"),
    _ENVIRONMENT: ("putenv", "unsetenv"),
    _PROGRAMS: ("system", "fork"),
    _MACHINE: ("getloadavg", "getpid", "times"),
}
_KINDS: dict[object, str] = {
    **dict.fromkeys(CLOCKS.values(), CLOCK),
    datetime.datetime.now: CLOCK,
    datetime.datetime.utcnow: CLOCK,
    datetime.datetime.today: CLOCK,
    datetime.date.today: CLOCK,
    **{getattr(os, n): kind for kind, names in _OF_OS.items() for n in names if hasattr(os, n)},
}
_BY_NAME = {  # where the function is made anew for each object, or its module may not be there
    **dict.fromkeys(
        ("connect", "connect_ex", "recv", "recv_into", "recvfrom"), ("socket", _NETWORK)
    ),
    "gethostbyname": ("_socket", _NETWORK),
    "getaddrinfo": ("_socket", _NETWORK),
    "fork_exec": ("_posixsubprocess", _PROGRAMS),
    "getrusage": ("resource", _MACHINE),
    "cache_info": ("_lru_cache_wrapper", _CACHE),
}
_TORCH = str(Path(torch.__file__).parent)
_LOADS = f"{_TORCH}/serialization.py"  # torch.load is a reader like any other
_HERE = f"{Path(__file__).parents[2]}/"
_LOGS = re.compile(  # what these read decides what is told
    r"/(logging|tqdm|wandb|tensorboard|tensorboardX|loguru|rich)/"
    r"|/(warnings|linecache|traceback|inspect)\.py$|^<frozen importlib"
)
WORDS = re.compile(
    r"\b(time|datetime|os|pathlib|Path|glob|socket|urllib|requests|psutil|resource|subprocess)\b"
    r"|\b(open|cache_info)\(|\b(load|read)\w*\("
)


@dataclass
class Reads:
    """What runs have read: by kind the user's lines, and the files that were opened."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def at(self, kind: str) -> str | None:
        """Return the first line that reads this."""
        return next(iter(self.lines.get(kind, ())), None)

    def told(self) -> tuple[str, ...]:
        """Say what was read, and what becomes of it."""
        return tuple(
            f"forward or loss reads {kind} ({', '.join(lines[:3])}): what is decided by it stays "
            "as it was when traced"
            for kind, lines in self.lines.items()
        )

    def event(self, frame: FrameType, event: str, called: Any, /) -> None:  # noqa: ANN401
        """Note what the profiler has seen, a call of a built-in function."""
        if event != "c_call":
            return
        kind = _KINDS.get(called) or _by_owner(called)
        if kind is not None:
            self.note(kind, frame)

    def note(self, kind: str, frame: FrameType | None) -> bool:
        """Note the user's line from which this is read; return whether it is the user's at all."""
        line = _users_line(frame)
        found = [] if line is None else self.lines.setdefault(kind, [])
        if line is not None and line not in found:
            found.append(line)
        return line is not None

    def opened(self, file: object, mode: str, frame: FrameType) -> None:
        """Note a file that is opened to be read."""
        if not {"r", "+"} & set(mode) or not isinstance(file, str | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if self.note(_FILES, frame) and path not in self.files:
            self.files.append(path)


@contextlib.contextmanager
def watching() -> Iterator[Reads]:
    """Note what the user's code reads meanwhile; nothing while another profiler is at work."""
    reads = Reads()
    if sys.getprofile() is not None:
        yield reads
        return
    with _noting_opens(reads):
        sys.setprofile(reads.event)
        try:
            yield reads
        finally:
            sys.setprofile(None)


@contextlib.contextmanager
def _noting_opens(reads: Reads) -> Iterator[None]:
    """Let `open` note what it is asked for: a profiler sees no arguments."""
    own = builtins.open

    @functools.wraps(own)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        reads.opened(file, str(mode), sys._getframe(1))
        return own(file, mode, *args, **kwargs)

    names: tuple[ModuleType, ...] = (builtins, io)
    for module in names:
        setattr(module, "open", opened)  # noqa: B010  # a name that mypy knows as another type
    try:
        yield
    finally:
        for module in names:
            setattr(module, "open", own)  # noqa: B010


def _by_owner(called: Any) -> str | None:  # noqa: ANN401  # a built-in function or method
    owner, kind = _BY_NAME.get(called.__name__, ("", None))
    if kind is None:
        return None
    own = type(getattr(called, "__self__", None))
    names = {kin.__name__ for kin in own.__mro__} | {str(getattr(called, "__module__", None))}
    return kind if owner in names else None


def _users_line(frame: FrameType | None) -> str | None:
    """Return the user's line on whose behalf this is read; None of torch's own, or a log's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE) or _LOGS.search(file):
            return None
        if is_own(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        if file.startswith(_TORCH) and file != _LOADS:
            return None
        frame = frame.f_back
    return None


# --------------------------------------------------------------------------- whose files


def mentions(model: nn.Module, loss: object, words: re.Pattern[str]) -> bool:
    """Whether one of the user's files that these come from has such a word at all."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    files = _own_files([*names, str(getattr(loss, "__module__", ""))])
    return any(_has(words, file) for file in files)


def lines_with(model: nn.Module, loss: object, words: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines of those files that have such a word, "model.py:3"."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    for file in _own_files([*names, str(getattr(loss, "__module__", ""))]):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            found = (n for n, line in enumerate(lines, 1) if words.search(line.partition("#")[0]))
            yield from (f"{Path(file).name}:{number}" for number in found)


def _own_files(names: list[str]) -> Iterator[str]:
    """Yield the user's files: of these modules, and of those whose names they know."""
    seen: set[str] = set()
    while names:
        module = sys.modules.get(names.pop())
        file = str(getattr(module, "__file__", None) or "")
        if module is None or file in seen or not is_own(file) or file.startswith(_HERE):
            continue
        seen.add(file)
        yield file
        names += map(_origin, vars(module).values())


def _origin(value: object) -> str:
    name = "__name__" if isinstance(value, ModuleType) else "__module__"
    with contextlib.suppress(Exception):  # the user's own objects
        return str(getattr(value, name, ""))
    return ""


def _has(words: re.Pattern[str], file: str) -> bool:
    try:
        return bool(words.search(Path(file).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return True
