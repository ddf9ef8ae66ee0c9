"""Limits of the system that a process meets: said in words, with what raises them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from bigbrain_fx.bundles.launch.process import users_environment
from bigbrain_fx.runtime import checkpoints
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.checkpoints import Checkpoints, begin_together
from bigbrain_fx.runtime.coded import InputError, MisuseError
from bigbrain_fx.runtime.control import Control, said
from bigbrain_fx.runtime.limits import (
    SHORT,
    THREADS,
    code_of,
    headline,
    remedy_of,
    require_threads,
    saying_limits,
)
from bigbrain_fx.runtime.local import Hub
from bigbrain_fx.runtime.mesh import _gloo_device, _listening_place
from bigbrain_fx.runtime.peers import CONTROL, PeerLostError
from bigbrain_fx.supervisor.pipe import Ears, line_pair
from tests.runtime.test_every_call_fails import ABOUT, NAMES, newest_loads
from tests.runtime.test_state import OPTIMIZERS, device
from tests.support.bundles import split_small
from tests.support.ledgers import local_ledger

NO_THREAD = RuntimeError("can't start new thread")


def chained() -> PeerLostError:
    """An error that was raised for one of gloo's."""
    error = PeerLostError("the devices could not be connected", code="BX5131")
    error.__cause__ = RuntimeError("Resource temporarily unavailable")
    return error


CASES = (
    (NO_THREAD, THREADS, SHORT),
    (chained(), THREADS, SHORT),
    (BlockingIOError(errno.EAGAIN, "a pipe that must not wait"), None, None),
    (FileNotFoundError(2, "No such file or directory"), None, None),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None, None),
)


@pytest.mark.parametrize(("error", "remedy", "code"), CASES)
def test_each_limit_has_its_remedy_and_code(
    error: Exception, remedy: str | None, code: int | None
) -> None:
    assert (remedy_of(error), code_of(error)) == (remedy, code)


class NoMore(threading.Thread):
    """Threads, of which the system gives two."""

    count = 0

    def start(self) -> None:
        NoMore.count += 1
        if NoMore.count > 2:
            raise RuntimeError(str(NO_THREAD))
        super().start()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no more than two threads be started."""
    monkeypatch.setattr(threading, "Thread", NoMore)
    monkeypatch.setattr(NoMore, "count", 0)


@pytest.mark.usefixtures("few")
def test_threads_that_a_library_will_want_are_tried_before() -> None:
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        require_threads(3)
    assert threading.active_count() == before, "those that were started have ended"


@pytest.mark.usefixtures("few")
def test_devices_of_one_process_start_all_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    programs = {name: (lambda: ran.append("")) for name in ("d0", "d1", "d2")}
    with pytest.raises(SystemExit) as ended, saying_limits():
        Hub().run(programs)
    assert ended.value.code == SHORT
    assert not ran
    assert capsys.readouterr().err == f"error[BX5902]: {NO_THREAD}: {THREADS}\n"


def test_a_process_that_cannot_listen_says_so_to_its_supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise NO_THREAD

    ours, theirs = line_pair()
    held = socket.socket(fileno=os.dup(theirs.fileno()))
    monkeypatch.setenv(CONTROL, str(theirs.fileno()))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for name in ("end_with_parent", "let_prints_be_lost"):
        monkeypatch.setattr(f"bigbrain_fx.runtime.control.{name}", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with ours, theirs, held:
        with pytest.raises(SystemExit) as ended:
            Control.inherited()
        ears = Ears(ours)
        beat, said = ears.hear(), ears.hear()
    assert ended.value.code == SHORT
    assert beat is not None
    assert beat["say"] == "beat"  # in which step it was: none
    assert beat["step"] == -1
    assert said is not None
    assert "ulimit -u" in said["text"]
    assert "ulimit -u" in capsys.readouterr().err


def test_a_commit_is_written_where_no_thread_is_left_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise NO_THREAD

    made = {name: device(OPTIMIZERS["adamw"]) for name in NAMES}
    ledger, store = local_ledger(20.0), CheckpointStore(tmp_path / "c")
    parts = {name: Checkpoints(store, 1, name, NAMES, ledger, ABOUT) for name in NAMES}
    begin_together(parts, made, resume=False)

    def run(name: str) -> None:
        for step in range(2):
            made[name].run_step(step)
            parts[name].after_step(made[name], step)
        parts[name].close(made[name])

    run_both = [threading.Thread(target=run, args=(name,)) for name in NAMES]
    monkeypatch.setattr(checkpoints, "threading", SimpleNamespace(Thread=Refused))
    for thread in run_both:
        thread.start()
    for thread in run_both:
        thread.join(60.0)
    assert newest_loads(tmp_path / "c") == 2


@pytest.mark.nightly
def test_a_path_that_safetensors_cannot_be_told_has_its_own_remedy(tmp_path: Path) -> None:
    bundle = split_small(tmp_path)
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    place.mkdir()
    done = subprocess.run(
        (sys.executable, str(bundle.rename(place / "B") / "train.py"), "--in-process"),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "move the bundle elsewhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interface_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(InputError, match=r"interface 'nope0' .* none of this host's \(.*lo"):
        _gloo_device(_listening_place())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, "'lo' .* is down, .*`ip link set lo up` as root"),
        ("wire9", "'wire9' .* has no address"),
    ],
)
def test_an_interface_without_an_address_is_said(
    name: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new network namespace gloo's own words came, twice, in a traceback of exit code 1."""

    def create_device(**_: str) -> None:
        raise RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address")

    _gloo_device.cache_clear()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "wire9")])
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_device)
    if name is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with pytest.raises(InputError, match=said):
        _gloo_device(_listening_place())


def test_a_bundle_finds_its_own_files_whatever_python_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert "PYTHONSAFEPATH" not in users_environment()


def test_traceback_of_an_error_that_is_no_limit_ends_with_its_code() -> None:
    with pytest.raises(MisuseError) as caught, saying_limits():
        raise MisuseError("its group is not there", code="BX5070")
    assert caught.value.__notes__ == ["code: BX5070"]


def test_error_that_travels_has_its_class_its_code_and_its_words() -> None:
    assert said(MisuseError("it is so", code="BX5070")) == "MisuseError[BX5070]: it is so"
    assert said(RuntimeError("it is so")) == "RuntimeError: it is so"
    assert headline(MisuseError("it is so", code="BX5070")) == "error[BX5070]: it is so"
