"""Every call of the supervisor to the system fails once, in a run in which a device dies, too.

What comes out is what comes out undisturbed; or the run ends at once with one line and the newest
commit. No process is left, whatever happens.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.bundles.launch import RunError, RunOptions, StepLine, run
from bigbrain_fx.runtime.records import read_records
from bigbrain_fx.supervisor import Event
from tests.support.bundles import (
    copied,
    edit,
    is_running,
    split_small,
    writing_everything,
)
from tests.support.killing import kill_once
from tests.support.warm import Popen

STEPS, KILLED_IN = 5, 2


@dataclass
class FailsOnce:
    """A call that fails the nth time, and then is as it was."""

    whole: Callable[..., Any]
    nth: int
    error: int
    count: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == self.nth:
            raise OSError(self.error, os.strerror(self.error))
        return self.whole(*args, **kwargs)


@dataclass(frozen=True)
class Place:
    """A call: where it is found, its name, the errors that the system may give, and when it fails.

    Attributes:
        ends: the run may end of it, with one line.
    """

    owner: Any
    name: str
    errors: tuple[int, ...]
    nth: tuple[int, ...] = (1, 3)  # of three processes the third is the replacement
    ends: bool = False


PLACES = (
    Place("bigbrain_fx.supervisor.crew", "line_pair", (errno.EMFILE, errno.ENOMEM)),
    Place("bigbrain_fx.supervisor.crew", "end_of", (errno.EMFILE,)),
    Place(Popen, "__init__", (errno.EAGAIN, errno.ENOMEM)),
    Place(Path, "open", (errno.ENOSPC, errno.EROFS, errno.EMFILE), (2, 4)),  # the plan, then logs
    Place(selectors.EpollSelector, "register", (errno.ENOMEM, errno.ENOSPC), (2, 6)),
    Place(os, "memfd_create", (errno.EMFILE, errno.ENOMEM), (1, 4), ends=True),
    Place("bigbrain_fx.supervisor.events.os", "write", (errno.ENOSPC, errno.EIO), (1, 9)),
    Place("bigbrain_fx.supervisor.host_memory", "open", (errno.EMFILE,), (1,)),
)
CASES = {
    f"{place.name.strip('_')}-{number}-{errno.errorcode[error]}": (place, number, error)
    for place in PLACES
    for error in place.errors
    for number in place.nth
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = split_small(tmp_path_factory.mktemp("calls"))
    kill_once(made, KILLED_IN)
    edit(made / "train.py", "from pathlib", "import os\nfrom pathlib")
    return made


@dataclass
class Seen:
    """A run that has ended: how, and what it left."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]
    events: list[Event] = field(default_factory=list)
    error: Exception | None = None


def tried(bundle: Path, folder: Path) -> Seen:
    """Run it as users do, with everything that is written."""
    copy, events, error = copied(bundle, folder), list[Event](), None
    options = writing_everything(folder, STEPS, spares=0)
    losses: list[float] = []
    try:
        run(copy, options, lambda line: losses.append(line.loss), on_event=events.append)
    except RunError as ended:
        error = ended
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "out").glob("*.safetensors")):
        tensors |= {f"{file.stem}/{k}": v for k, v in load_file(file).items()}
    return Seen(losses, tensors, events, error)


@pytest.fixture(scope="module")
def undisturbed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    seen = tried(bundle, tmp_path_factory.mktemp("undisturbed"))
    assert seen.error is None
    assert [e["device"] for e in seen.events if e["event"] == "died"] == ["d1"]
    return seen


@pytest.mark.gate("end_of-3-EMFILE", "init-1-EAGAIN", "open-2-EROFS", "write-1-ENOSPC")
@pytest.mark.parametrize(("place", "nth", "error"), CASES.values(), ids=CASES)
def test_a_call_that_fails_once(
    bundle: Path,
    undisturbed: Seen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Place,
    nth: int,
    error: int,
) -> None:
    with monkeypatch.context() as patch:
        fails = broken(patch, place, nth, error)
        seen = tried(bundle, tmp_path)
    assert fails.count >= nth, "it was not called so often"
    pids = [event["pid"] for event in seen.events if event["event"] == "started"]
    assert not any(map(is_running, pids))
    if place.ends and seen.error is not None:
        assert os.strerror(error) in str(seen.error)
        return
    assert seen.error is None
    assert seen.losses == undisturbed.losses
    assert seen.tensors.keys() == undisturbed.tensors.keys()
    assert all(torch.equal(seen.tensors[k], undisturbed.tensors[k]) for k in seen.tensors)
    assert (
        max(record.step for record in read_records(tmp_path / "commits", lambda _: None)) == STEPS
    )


def broken(patch: pytest.MonkeyPatch, place: Place, nth: int, error: int) -> FailsOnce:
    """Let a call fail in this process: in the supervisor, not in what it starts."""
    import importlib

    owner = place.owner
    if isinstance(owner, str):
        try:
            owner = importlib.import_module(owner)
        except ModuleNotFoundError:
            module, _, attribute = owner.rpartition(".")
            owner = getattr(importlib.import_module(module), attribute)
    whole = getattr(owner, place.name, None) or open
    fails = FailsOnce(whole, nth, error)
    if isinstance(owner, type):
        patch.setattr(owner, place.name, lambda *a, **k: fails(*a, **k))
    else:
        patch.setattr(owner, place.name, fails, raising=False)
    return fails


def test_a_socket_that_fails_once(
    bundle: Path, undisturbed: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending and hearing: the kernel has no memory now and then."""
    from bigbrain_fx.supervisor import pipe as lines

    class Short(socket.socket):
        calls = 0

        def sendmsg(self, *args: Any) -> int:
            Short.calls += 1
            if Short.calls % 3 == 0:
                raise OSError(errno.ENOBUFS, "no memory for a packet")
            return super().sendmsg(*args)

        def recv(self, *args: Any) -> bytes:
            Short.calls += 1
            if Short.calls % 5 == 0:
                raise OSError(errno.ENOMEM, "no memory for a packet")
            return super().recv(*args)

    pair = lines.line_pair

    def short_pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        return Short(fileno=ours.detach()), theirs

    monkeypatch.setattr("bigbrain_fx.supervisor.crew.line_pair", short_pair)
    seen = tried(bundle, tmp_path)
    assert seen.error is None
    assert Short.calls > 30
    assert seen.losses == undisturbed.losses


# --------------------------------------------------------------------------- who is told


@pytest.mark.nightly
def test_a_listener_whose_pipe_is_gone_changes_nothing(bundle: Path, tmp_path: Path) -> None:
    copy, calls = copied(bundle, tmp_path), list[StepLine]()

    def gone(line: StepLine) -> None:
        calls.append(line)
        raise BrokenPipeError

    done = run(copy, RunOptions(STEPS, spares=0), gone, on_event=lambda _: None)
    assert [line.step for line in done.steps] == list(range(STEPS))
    assert len(calls) == 1


@pytest.mark.nightly
def test_a_listener_that_waits_does_not_hold_up_the_run(bundle: Path, tmp_path: Path) -> None:
    copy, gate = copied(bundle, tmp_path), threading.Event()

    def event(entry: Event) -> None:
        if entry["event"] == "started":
            assert gate.wait(60.0)

    def steps(line: StepLine) -> None:
        order.append(line.step)

    order: list[int] = []
    watcher = threading.Thread(target=open_after_steps, args=(copy, gate))
    edit(
        copy / "train.py", "HOOKS.on_step_end", "HOOKS.on_step_end.append(note)\nHOOKS.on_step_end"
    )
    edit(copy / "train.py", "def kill_once", NOTE + "def kill_once")
    watcher.start()
    done = run(copy, RunOptions(STEPS, spares=0), steps, on_event=event)
    watcher.join(60.0)
    assert len(done.steps) == STEPS
    assert order == list(range(STEPS))


NOTED = "HOOKS.on_step_end.append(note)"
NOTE = '''def note(device, step):
    """Say that it was done."""
    Path(__file__).with_name(f"done-{step}").touch()


'''


def open_after_steps(copy: Path, gate: threading.Event) -> None:
    until = time.monotonic() + 50.0
    while time.monotonic() < until and not (copy / f"done-{STEPS - 1}").exists():
        time.sleep(0.02)
    gate.set()
