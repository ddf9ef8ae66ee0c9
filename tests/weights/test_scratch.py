"""Folders of work under way go with their command, or with the next one where that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bigbrain_fx.weights import Scratch, scratch

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
