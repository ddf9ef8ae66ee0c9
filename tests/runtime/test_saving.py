"""`--save` on a disk that is full or not ours: whole files under their names, or none."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.errors import InputError
from bigbrain_fx.runtime import saving
from bigbrain_fx.runtime.disk import Disk
from bigbrain_fx.runtime.image import Buffer
from bigbrain_fx.runtime.limits import show
from bigbrain_fx.runtime.saving import save_together
from bigbrain_fx.runtime.tensor_file import SaveError, UnnamedFile, put_all, write_tensors
from bigbrain_fx.supervisor import FailedError
from bigbrain_fx.weights import read_checkpoint, require_one_save
from tests.support import warm
from tests.support.bundles import copied, edit
from tests.support.command_line import files, tiny_bundle
from tests.support.ledgers import local_ledger
from tests.support.replayed import supervised

OLD, NEW = {"w": torch.zeros(8)}, {"w": torch.ones(8)}
STEPS = 3


class Failing(Disk):
    """A disk on which one call fails."""

    def __init__(self, call: str, number: int = errno.ENOSPC) -> None:
        self.call, self.error = call, OSError(number, os.strerror(number))

    def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
        if self.call == "write":
            path.write_bytes(b"half")
            raise self.error
        super().write(path, pieces)

    def rename(self, old: Path, new: Path) -> None:
        if self.call == "rename":
            self.call = ""  # and not again, where files are taken back
            raise self.error
        super().rename(old, new)

    def sync(self, folder: Path) -> None:
        if self.call == "sync":
            raise self.error
        super().sync(folder)


def test_earlier_files_come_back_after_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems without hard links."""

    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    files = [tmp_path / f"{name}.safetensors" for name in ("d0", "d1")]
    write_tensors(OLD, files[0])
    new = [UnnamedFile(NEW, files[0]), UnnamedFile(NEW, files[1], Failing("sync"))]
    with pytest.raises(SaveError):
        put_all(new)
    assert list(tmp_path.iterdir()) == [files[0]]
    assert torch.equal(load_file(files[0])["w"], OLD["w"])


@pytest.mark.parametrize("call", ["write", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_earlier_files_stay_whole(tmp_path: Path, call: str, number: int) -> None:
    file = tmp_path / "d0.safetensors"
    write_tensors(OLD, file)
    with pytest.raises(
        SaveError, match=r"cannot write .*d0.safetensors: .*: give a folder|free space"
    ):
        put_all([UnnamedFile(NEW, file, Failing(call, number))])
    assert torch.equal(load_file(file)["w"], OLD["w"])


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    with pytest.raises(SaveError):
        UnnamedFile(NEW, tmp_path / "d0.safetensors", Failing("write"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["write", "rename", "sync"])
@pytest.mark.parametrize("is_there", [True, False])
def test_one_device_that_cannot_write_keeps_all_from_changing_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, is_there: bool
) -> None:
    local = local_ledger(30.0)
    for name in ("d0", "d1") if is_there else ():
        write_tensors(OLD, tmp_path / f"{name}.safetensors")

    def aside(device: Any, folder: Path, name: str) -> UnnamedFile:
        disk = Failing(call if device.name == "d1" else "")
        return UnnamedFile(NEW, folder / f"{name}.safetensors", disk)

    def save(rank: int) -> str:
        device: Any = SimpleNamespace(
            name=f"d{rank}", names=("d0", "d1"), state=lambda: NEW, of_run={}, stands_for=()
        )
        with pytest.raises(SaveError) as error:
            save_together(device, tmp_path, local)
        return str(error.value)

    monkeypatch.setattr(saving, "save_aside", aside)
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(save, (0, 1)))
    assert said[0] == said[1]
    assert "d1.safetensors: No space left on device" in said[0]
    names = ["d0.safetensors", "d1.safetensors"] if is_there else []
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(torch.equal(load_file(p)["w"], OLD["w"]) for p in tmp_path.iterdir())


NO_ROOM = 'raise OSError(28, "No space left on device", str(path))'


@pytest.mark.nightly
def test_a_supervised_run_without_room_leaves_nothing_half(
    trained_bundle: Path, tmp_path: Path
) -> None:
    copy = copied(trained_bundle, tmp_path)
    edit(copy / "runtime" / "disk.py", "os.fsync(file.fileno())", NO_ROOM)
    out = tmp_path / "run" / "bundle" / "out"
    with pytest.raises(FailedError) as failed:
        supervised(copy, tmp_path / "run", ("d0", "d1"), STEPS)
    assert "No space left on device: nothing was changed there" in str(failed.value.death.text)
    # A device that is ended while it writes may leave a file aside; the next save removes it.
    assert not list(out.glob("*.safetensors"))


def train(bundle: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "train.py", "--in-process", "--steps", "1", *map(str, words)]
    return warm.run(line, cwd=bundle, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.nightly
def test_a_folder_that_cannot_be_one_is_refused_before_the_training(
    trained_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = train(trained_bundle, "--save", tmp_path / "file")
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr
        == f"error[BX5145]: cannot save in {tmp_path}/file: File exists: give another folder\n"
    )


def test_a_full_log_is_no_error() -> None:
    with open("/dev/full", "w") as full:
        show("a step", full)
        with contextlib.suppress(OSError):
            full.close()
    show("another", full)  # closed


@pytest.mark.nightly
def test_a_step_that_nobody_reads_stops_no_training(trained_bundle: Path, tmp_path: Path) -> None:
    reader, number = os.pipe()
    os.close(reader)
    words = [sys.executable, "-u", "train.py", "--in-process", "--steps", "2", "--json"]
    done = subprocess.run(
        [*words, "--save", str(tmp_path / "out")],
        cwd=trained_bundle, stdout=number, stderr=subprocess.PIPE, timeout=120, check=False,
    )  # fmt: skip
    os.close(number)
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "d0.safetensors",
        "d1.safetensors",
    ]


def test_files_of_two_runs_are_not_joined(tmp_path: Path) -> None:
    """A run may be killed between two of its files' names: half of them are of the run before."""
    for name, steps in (("d0", 5), ("d1", 2)):
        path = tmp_path / f"{name}.safetensors"
        UnnamedFile(
            {f"{name}.weight": torch.zeros(2)}, path, facts={"steps": steps, "seed": 0}
        ).put()
    with pytest.raises(InputError, match="files of different runs") as error:
        require_one_save(tmp_path)
    assert error.value.notes == (
        "d0.safetensors: --steps 5, seed 0",
        "d1.safetensors: --steps 2, seed 0",
    )
    UnnamedFile(
        {"d1.weight": torch.zeros(2)}, tmp_path / "d1.safetensors", facts={"steps": 5, "seed": 0}
    ).put()
    require_one_save(tmp_path)


OTHER = """


def others(seed):
    for batch in batches(seed):
        yield {name: tensor * 0.5 for name, tensor in batch.items()}
"""


@pytest.mark.nightly
def test_two_runs_of_one_seed_and_as_many_steps_are_told_apart(tmp_path: Path) -> None:
    """As where a run is killed between two names, in a folder that another has saved in."""
    bundle = tiny_bundle(tmp_path)
    other = copied(bundle, tmp_path)
    with (other / "training.py").open("a") as file:
        file.write(OTHER)
    edit(other / "train.py", "training.batches", "training.others")
    first, second, again = (tmp_path / name for name in ("first", "second", "again"))
    for made, folder in ((bundle, first), (other, second), (bundle, again)):
        train(made, "--save", folder)
    assert files(first) == files(again)
    assert files(first) != files(second)
    shutil.copy(second / "d1.safetensors", first / "d1.safetensors")
    for read in (require_one_save, read_checkpoint):
        with pytest.raises(InputError, match="files of different runs"):
            read(first)
    read_checkpoint(second)
