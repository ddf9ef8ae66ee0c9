"""What is written is as open as the umask says, though libraries write it for the owner alone."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigbrain_fx.weights import as_umask_says, new_folder, replace_file, scratch_folder


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
