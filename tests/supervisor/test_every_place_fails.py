"""Every place where the supervisor calls the system fails once, while a device dies, too.

The places are found twice: by reading the files, and as they are met. What was read and not met is
excused here, with the reason; so a new call is struck, or its author is asked for a reason.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.bundles.launch import run
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.supervisor import Event, remedy_of
from tests.support.bundles import (
    copied,
    edit,
    is_running,
    split_small,
    writing_everything,
)
from tests.support.excused import RUNTIME, SUPERVISOR
from tests.support.killing import kill_once
from tests.support.places import places
from tests.support.warm import Popen

STEPS, ROUNDS = 5, 40
LONGEST_S = 40.0  # a run
ROOM = f"{os.sep}bigbrain_fx{os.sep}supervisor{os.sep}"
LIBRARY = os.path.dirname(os.__file__) + os.sep
THROUGH = tuple(
    LIBRARY + name
    for name in ("pathlib", "socket", "subprocess", "threading", "tempfile", "selectors", "context")
)
DISK = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE)
FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
LINE = (errno.ENOMEM, errno.ENOBUFS)  # one that is closed is told by its end, too
KINDS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "open": (builtins, "open", DISK),
    "io.open": (io, "open", DISK),
    **{f"os.{n}": (os, n, DISK) for n in ("open", "mkdir", "unlink", "rename", "write", "read")},
    **{f"os.{n}": (os, n, FILES) for n in ("dup", "dup2", "pidfd_open", "memfd_create", "pipe")},
    "os.stat": (os, "stat", (errno.EIO, errno.EACCES)),
    "os.killpg": (os, "killpg", (errno.EPERM, errno.ESRCH)),
    "os.waitid": (os, "waitid", (errno.ECHILD,)),
    "os.set_blocking": (os, "set_blocking", (errno.ENOMEM,)),
    "socketpair": (socket, "socketpair", FILES),
    "Popen": (subprocess.Popen, "__init__", (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)),
    "warm Popen": (Popen, "__init__", (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)),
    "sendmsg": (socket.socket, "sendmsg", LINE),
    "recv": (socket.socket, "recv", LINE),
    "send": (socket.socket, "send", LINE),
    "register": (selectors.EpollSelector, "register", (errno.ENOMEM, errno.ENOSPC)),
    "modify": (selectors.EpollSelector, "modify", (errno.ENOMEM,)),
    "select": (selectors.EpollSelector, "select", (errno.ENOMEM,)),
    "epoll": (selectors, "DefaultSelector", FILES),
    "TemporaryFile": (tempfile, "TemporaryFile", DISK),
    "thread": (threading.Thread, "start", (errno.EAGAIN,)),
}
BY_CALL = {  # how the calls that are read in a file are met
    **{f".{n}": {"open", "io.open"} for n in ("open", "read_text", "write_text", "read_bytes")},
    "open": {"open", "io.open"},
    **{f".{n}": {"os.stat"} for n in ("stat", "is_file", "is_dir", "exists")},
    **{f".{n}": {n} for n in ("register", "modify", "select", "send", "sendmsg", "recv")},
    ".start": {"thread"},
    ".mkdir": {"os.mkdir"},
    "socket.socketpair": {"socketpair"},
    "selectors.DefaultSelector": {"epoll"},
    "subprocess.Popen": {"Popen"},
    "tempfile.TemporaryFile": {"TemporaryFile"},
}

ENDING = {  # without these a run cannot begin, or a process cannot be replaced
    ("aside.py", "__init__"),
    ("events.py", "__init__"),
    ("snapshots.py", "nameless"),
    ("crew.py", "__init__"),
    ("crew.py", "turn"),
}


class Strikes:
    """Fails every place once, in all runs together, at the nth call that a run makes there."""

    def __init__(self, nth: int = 1) -> None:
        self.nth = nth
        self.struck: dict[tuple[str, str, str], str] = {}
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.left = 0  # that may be struck in this run
        self.here = threading.local()

    def begin(self, count: int) -> None:
        """Begin a run in which so many places may be struck."""
        self.left = count
        self.calls.clear()

    def due(self, name: str, errors: tuple[int, ...]) -> int | None:
        """Return the error that a call fails with now; None: it does not."""
        if self.left <= 0 or getattr(self.here, "busy", False):
            return None
        self.here.busy = True
        try:
            place = self._place()
            if place is None or (*place, name) in self.struck:
                return None
            self.calls[(*place, name)] += 1
            if self.calls[(*place, name)] < self.nth:
                return None
            error = errors[len(self.struck) % len(errors)]
            self.struck[(*place, name)] = errno.errorcode[error]
            self.left -= 1
            return error
        finally:
            self.here.busy = False

    def _place(self) -> tuple[str, str] | None:
        frame: Any = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if ROOM in code.co_filename and not code.co_name.startswith("<"):
                return Path(code.co_filename).name, code.co_name
            inner = code.co_filename.startswith(THROUGH) or ROOM in code.co_filename
            if not inner and "/support/warm" not in code.co_filename:
                return None
            frame = frame.f_back
        return None

    def wrapped(self, name: str, whole: Callable[..., Any], errors: tuple[int, ...]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            error = self.due(name, errors)
            if error is None:
                return whole(*args, **kwargs)
            if name == "thread":
                raise RuntimeError("can't start new thread")
            raise OSError(error, os.strerror(error))

        return call


def tried(
    bundle: Path, folder: Path, strikes: Strikes, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Event], str, dict[str, torch.Tensor]]:
    """Run it; return the events, what was said of its end, and what it saved."""
    copy, events, said = copied(bundle, folder), list[Event](), ""
    options = writing_everything(folder, STEPS, spares=1)
    with monkeypatch.context() as patch:
        for name, (owner, attribute, errors) in KINDS.items():
            whole = getattr(owner, attribute)
            patch.setattr(owner, attribute, strikes.wrapped(name, whole, errors))
        try:
            run(copy, options, on_event=events.append)
        except BigBrainError as error:
            said = str(error)
        except (OSError, RuntimeError) as error:  # of limits the command line says the remedy
            said = str(error) if remedy_of(error) else f"{type(error).__name__}: {error}"
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "out").glob("*.safetensors")):
        tensors |= {f"{file.stem}/{name}": found for name, found in load_file(file).items()}
    return events, said, tensors


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = split_small(tmp_path_factory.mktemp("places"))
    kill_once(made)
    edit(made / "train.py", "from pathlib", "import os\nfrom pathlib")
    return made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("nth", "rounds"),
    [
        pytest.param(3, 1, id="a few"),
        pytest.param(1, ROUNDS, id="all", marks=pytest.mark.nightly),
        pytest.param(3, ROUNDS, id="all, the third call", marks=pytest.mark.nightly),
    ],
)
def test_every_place_fails_once(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, rounds: int
) -> None:
    """Of three processes the third is the replacement."""
    strikes = Strikes(nth)
    _, calm, expected = tried(bundle, tmp_path / "calm", strikes, monkeypatch)
    assert not calm
    assert expected
    faults: list[str] = []
    for number in range(rounds):
        before, folder, began = set(strikes.struck), tmp_path / str(number), time.monotonic()
        strikes.begin(2)
        events, said, tensors = tried(bundle, folder, strikes, monkeypatch)
        strikes.begin(0)
        new = {place: strikes.struck[place] for place in set(strikes.struck) - before}
        if not new:
            break
        where = f"{number}: {new}: {said!r}"
        took = time.monotonic() - began
        if took > LONGEST_S:
            faults.append(f"{where}: {took} s")
        pids = [event["pid"] for event in events if event["event"] == "started"]
        if any(map(is_running, pids)):
            faults.append(f"{where}: orphans")
        if tensors and any(not torch.equal(tensors[n], expected[n]) for n in tensors):
            faults.append(f"{where}: other bits")
        records = []
        if (folder / "commits").exists():
            records = CheckpointStore(folder / "commits").records()
        if not said and (
            tensors.keys() != expected.keys() or max(r.step for r in records) != STEPS
        ):
            faults.append(f"{where}: not all is there")
        if "Traceback" in said or "Error: " in said:
            faults.append(f"{where}: not in words")
        if said and not ENDING & {place[:2] for place in new}:
            faults.append(f"{where}: ended")
    assert not faults, "\n".join(faults)
    assert new or rounds == ROUNDS
    if rounds == ROUNDS:
        assert not new, "there are more places"
    if rounds == ROUNDS and nth == 1:
        left = {place for place in places("supervisor") if not is_met(place, strikes)}
        assert left <= SUPERVISOR.keys(), "strike what is new, or excuse it"


def is_met(place: str, strikes: Strikes) -> bool:
    """Whether a place that was read in a file has failed."""
    file, function, call = place.split()
    names = BY_CALL.get(call, {call})
    return any((file, function, name) in strikes.struck for name in names)


@pytest.mark.gate("supervisor-table1")
@pytest.mark.parametrize(("room", "table"), [("runtime", RUNTIME), ("supervisor", SUPERVISOR)])
def test_nothing_is_excused_that_is_not_there(room: str, table: Mapping[str, str]) -> None:
    assert table.keys() <= set(places(room))
