"""Work in a fork of this process, without effects here: a function, or a model file run anew.

    the file, or text of it, seeded ─▶ a fork ─▶ a short text for each value

The module knows files and text, and the parts of a process that a fork must leave to its parent; it
compares nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from bigbrain_fx.frontend.client import Lines
from bigbrain_fx.frontend.digests import digest
from bigbrain_fx.frontend.service import end_with_parent
from bigbrain_fx.frontend.users_code import users_folder

LIMIT_S = 30.0  # a top that takes longer is not run again
FAILED = "!"  # no name of Python's: what the run raised

Read = Callable[[types.ModuleType, Path], Mapping[str, str]]


def run_apart(read: Read, path: Path, seed: int, other_seed: int) -> Mapping[str, str] | None:
    """Run code in a fork of this process; return its values, or None where it takes too long.

    Args:
        read: the code.
        path: the file of the code.
        seed: of torch's generator.
        other_seed: of Python's and NumPy's generators.
    """
    return apart(partial(_answer, read, path, seed, other_seed))


def apart(
    work: Callable[[], Mapping[str, str]], limit_s: float | None = None
) -> Mapping[str, str] | None:
    """Do work in a fork of this process; return its result, or None where it takes too long."""
    with Fork(lambda _, say: say(dict(work()))) as fork:
        return fork.answer(LIMIT_S if limit_s is None else limit_s)


Say = Callable[[Mapping[str, object]], None]
Serve = Callable[[IO[str], Say], None]
Ends = tuple[int, int]  # of two pipes: one to read, and one to write


class Answering:
    """A process that answers requests: one JSON object a line each way.

    Args:
        begin: starts it, given the ends that it reads and writes, and those of this process.
    """

    def __init__(self, begin: Callable[[Ends, Ends], None]) -> None:
        asked, told = os.pipe(), os.pipe()
        begin((asked[0], told[1]), (asked[1], told[0]))
        os.close(asked[0])
        os.close(told[1])
        self._requests, self._pipe, self._lines = os.fdopen(asked[1], "w"), told[0], Lines(told[0])

    def ask(self, request: Mapping[str, object]) -> None:
        """Send a request."""
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()

    def answer(self, limit_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next answer; None where the fork has ended, or takes longer."""
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        with contextlib.suppress(TimeoutError):
            line = self._lines.next(deadline_s)
            return json.loads(line) if line else None
        return None

    def close(self) -> None:
        """End it, with what the user's code may have started there."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        os.close(self._pipe)


class Fork(Answering):
    """A fork of this process, made here and now.

    Args:
        serve: reads requests and answers them, in the fork; it ends with that.
    """

    def __init__(self, serve: Serve) -> None:
        super().__init__(partial(self._begin, serve))

    def _begin(self, serve: Serve, its: Ends, ours: Ends) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            for end in ours:
                os.close(end)
            _be_the_fork(serve, *its)

    def close(self) -> None:
        """End it, with what the user's code may have started there."""
        super().close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _be_the_fork(serve: Serve, requests: int, answers: int) -> None:
    """Serve, in a group of processes of its own, and end."""
    try:
        os.setpgid(0, 0)
        answer(serve, requests, answers)
    finally:
        os._exit(0)


def answer(serve: Serve, requests: int, answers: int) -> None:
    """Serve, quietly, until the requests or the parent end."""
    end_with_parent()
    be_quiet()
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    with os.fdopen(requests) as asked, os.fdopen(answers, "w") as told:

        def say(said: Mapping[str, object]) -> None:
            told.write(json.dumps(said) + "\n")
            told.flush()

        serve(asked, say)


def be_quiet() -> None:
    """Leave the streams of this process to its parent."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)


def _answer(read: Read, path: Path, seed: int, other_seed: int) -> Mapping[str, str]:
    """Be a new process, as far as the user's own modules go, and run."""
    folder = path.parent
    for name in [name for name, module in sys.modules.items() if is_of(module, folder)]:
        del sys.modules[name]
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    torch.manual_seed(seed)
    random.seed(other_seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(other_seed)
    with users_folder(folder):
        return read(module, path)


def is_of(module: object, folder: Path) -> bool:
    """Whether a module is in the user's folder, and neither of bigbrain_fx nor installed there."""
    file = str(getattr(module, "__file__", None) or "")
    ours = str(getattr(module, "__name__", "")).partition(".")[0] == "bigbrain_fx"
    return file.startswith(f"{folder}{os.sep}") and "site-packages" not in file and not ours


def values_of_text(text: str, module: types.ModuleType, path: Path) -> Mapping[str, str]:
    """Run text as a file; return the values of the names that it binds."""
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        return {FAILED: f"{type(error).__name__}: {error}"}
    return dict(values(vars(module), path.parent))


def values(scope: Mapping[str, object], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of a scope, and a short text for each value."""
    is_own = partial(is_of, folder=folder)
    for name, value in list(scope.items()):
        if not name.startswith("__"):
            yield name, digest(value, is_own)
