"""Folders of work under way go with their command; what is written is as open as the umask says."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigbrain_fx.weights import (
    Scratch,
    as_umask_says,
    new_folder,
    replace_file,
    scratch,
    scratch_folder,
)

HOLDS = """
import sys, time
from bigbrain_fx.weights import Scratch
folder = Scratch("test")
open(folder.name + "/file", "w").close()
print(folder.name, flush=True)
sys.stdin.read()
"""
SWEEPS = "from bigbrain_fx.weights import Scratch\nwith Scratch('next') as folder: print(folder)"
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _holder() -> tuple[subprocess.Popen[str], Path]:
    words = [sys.executable, "-c", HOLDS]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def _next() -> Path:
    words = [sys.executable, "-c", SWEEPS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return Path(done.stdout.strip())


def test_a_scratch_folder_goes_with_its_block(place: Path) -> None:
    with Scratch("test") as folder:
        Path(folder, "file").touch()
        assert [str(each) for each in place.iterdir()] == [folder]
    assert list(place.iterdir()) == []


def test_remains_of_a_killed_command_go_with_the_next(place: Path) -> None:
    holder, folder = _holder()
    living, held = _holder()
    with holder, living:
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
        assert folder.is_dir()
        _next()
        assert list(place.iterdir()) == [held]  # the killed one's is gone, the living one's is not
        assert (held / "file").is_file()
        living.communicate()
    assert list(place.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root only")
def test_scratch_folders_of_others_stay(place: Path) -> None:
    theirs, link = place / f"{scratch._here()}-test-a", place / f"{scratch._here()}-test-b"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    target = place / "kept"
    target.mkdir()
    link.symlink_to(target)
    file = place / f"{scratch._here()}-test-c"
    file.touch()
    _next()
    assert sorted(place.iterdir()) == sorted([theirs, target, link, file])


def test_a_sweep_that_comes_before_the_lock_takes_no_folder_from_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold = scratch._hold
    taken: list[str] = []

    def late(folder: str) -> int | None:
        if not taken:
            taken.append(folder)
            _next()  # it finds one that nobody holds yet
        return hold(folder)

    monkeypatch.setattr(scratch, "_hold", late)
    with Scratch("test") as folder:
        assert not Path(taken[0]).exists()
        assert Path(folder).is_dir()
        _next()
        assert Path(folder).is_dir()


# --------------------------------------------------------------------------- the umask


@pytest.fixture(params=[0o022, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_as_open_as_the_umask_says(umask: int, tmp_path: Path) -> None:
    first, second = new_folder(tmp_path / "bundle"), new_folder(tmp_path / "bundle")
    assert first != second
    assert mode(first) == 0o777 & ~umask
    file = first / "d0.safetensors"
    save_file({"x": torch.ones(2)}, file)
    as_umask_says(file)
    assert mode(file) == 0o666 & ~umask
    assert [path.name for path in first.iterdir()] == ["d0.safetensors"]


def killed(place: Path) -> None:
    """Begin to write in a process that is killed before it has ended."""
    pid = os.fork()
    if pid == 0:
        (new_folder(place) / "part").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_remains_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    killed(place)
    (left,) = tmp_path.iterdir()
    with scratch_folder(tmp_path / "other"):
        assert left.exists()
    with scratch_folder(place) as mine:
        assert list(tmp_path.iterdir()) == [mine]
        assert len({mine, new_folder(place)}) == 2  # nobody's that lives
        assert mine.exists()
    replace_file(place, b"whole")
    assert place.read_bytes() == b"whole"


def test_files_that_others_may_still_write_stay(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    killed(place)
    (left,) = tmp_path.iterdir()
    system, pid, number = left.name.removeprefix(".bundle-").split("-")
    for name in (
        f".bundle-{'0' * len(system)}-{pid}-{number}",  # of another host, or container
        f".bundle-{system}-{os.getppid()}-0",  # it lives
        f".bundle-{system}-{pid}-{number}-copy",
        f".bundle-{pid}-{number}",
        f".bundle.old-{system}-{pid}-0",  # what was there before, perhaps the only one
    ):
        (tmp_path / name).mkdir()
    before = {path.name for path in tmp_path.iterdir()} - {left.name}
    with scratch_folder(place) as mine:
        assert {path.name for path in tmp_path.iterdir()} == {*before, mine.name}
