"""Commits on a disk: whatever stops wherever, there is one that loads; what is broken is named."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.runtime.checkpoint_format import Part, digest, sealed, unsealed
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.disk import Disk
from bigbrain_fx.runtime.image import read_layout
from tests.support.commit_disks import (
    ABOUT,
    DEVICES,
    CrashError,
    CrashingDisk,
    QuickDisk,
    commit,
    image,
    load_commit,
    with_two_commits,
)

ROOT = Path(__file__).resolve().parents[2]


def loaded_step(folder: Path, said: list[str] | None = None) -> int:
    """Load both devices; return the step, after a look at every byte."""
    steps = set()
    for device in DEVICES:
        heard: list[str] = [] if said is None else said
        found, _ = load_commit(folder, device, ABOUT, heard.append)
        assert found.image[:] == image(found.record.step, device)
        steps.add(found.record.step)
    assert len(steps) == 1
    return steps.pop()


# --------------------------------------------------------------------------- written and read


def test_a_checkpoint_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    generation = with_two_commits(folder)
    commit(folder, 30, generation, Disk())
    assert loaded_step(folder) == 30
    assert sorted(p.name for p in folder.glob("commit-*")) == [
        "commit-20-g1",
        "commit-20.json",
        "commit-30-g1",
        "commit-30.json",
    ]


def test_without_a_record_nothing_is_committed(tmp_path: Path) -> None:
    generation = with_two_commits(folder := tmp_path / "commits")
    for device in DEVICES:
        CheckpointStore(folder).write_part(device, image(30, device), generation)
    assert loaded_step(folder) == 20


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("looks", [CheckpointStore.records, CheckpointStore.fence])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    looks: Callable[..., object], error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_two_commits(folder := tmp_path / "commits")

    def scandir(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match=os.strerror(error)):
        looks(CheckpointStore(folder))


def test_a_record_names_one_step_only() -> None:
    parts = {"d0": Part(1), "d1": Part(2)}
    with pytest.raises(ValueError, match="a checkpoint is of one step"):
        CheckpointStore(Path()).commit(parts, 1, {})


def test_a_device_removes_old_states_where_nobody_else_does(tmp_path: Path) -> None:
    generation = with_two_commits(folder := tmp_path / "commits")
    CheckpointStore(folder).write_part("d1", image(30, "d1"), generation)
    CheckpointStore(folder).prune_folders(["commit-20-g1"])
    assert not (folder / "commit-10-g1").exists()
    assert (folder / "commit-20-g1" / "d0.safetensors").exists()
    assert (folder / "commit-30-g1" / "d1.safetensors").exists()  # it may be being written


# --------------------------------------------------------------------------- crashes


def calls_of_a_commit(tmp_path: Path) -> int:
    disk = CrashingDisk()
    generation = with_two_commits(tmp_path / "counted")
    commit(tmp_path / "counted", 30, generation, disk)
    return disk.calls


@pytest.mark.gate("process")
@pytest.mark.parametrize("loses", [False, True], ids=["process", "power"])
def test_after_a_crash_at_any_call_there_is_a_commit_that_loads(
    tmp_path: Path, loses: bool
) -> None:
    calls, outcomes = calls_of_a_commit(tmp_path), []
    for at in range(1, calls + 1):
        folder = tmp_path / f"at-{at}"
        generation, disk = with_two_commits(folder), CrashingDisk(at)
        with pytest.raises(CrashError):
            commit(folder, 30, generation, disk)
        if loses:
            disk.lose()
        outcomes.append(loaded_step(folder))
        commit(folder, 40, CheckpointStore(folder, QuickDisk()).begin_generation())
        assert loaded_step(folder) == 40
        assert not [p for p in folder.rglob("*") if p.name.endswith(".tmp")]
        assert len(list(folder.glob("commit-*-g*"))) == len(list(folder.glob("commit-*.json"))) == 2
    assert outcomes == sorted(outcomes)  # from some call on the new commit counts, for good
    assert {20, 30} == set(outcomes)


def test_remains_of_a_dead_process_go_with_the_next_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    generation = with_two_commits(folder)
    place = folder / "commit-30-g1"
    place.mkdir()
    (place / ".d0.safetensors.99.tmp").write_bytes(b"a part")
    commit(folder, 30, generation)
    assert sorted(p.name for p in place.iterdir()) == [
        "d0.json",
        "d0.safetensors",
        "d1.json",
        "d1.safetensors",
    ]


CHILD = """
import sys, types
from pathlib import Path
root, folder, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, str(root))
for name in ("bigbrain_fx", "bigbrain_fx.runtime"):  # without what else is in these packages
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")))]
from tests.support.commit_disks import KilledDisk, commit
assert "torch" not in sys.modules
commit(folder, 30, 1, KilledDisk(at))
"""


@pytest.mark.nightly
def test_after_sigkill_at_any_call_there_is_a_commit_that_loads(tmp_path: Path) -> None:
    calls, outcomes = calls_of_a_commit(tmp_path), []
    for at in range(1, calls + 1, 2):
        folder = tmp_path / f"at-{at}"
        with_two_commits(folder)
        words = [sys.executable, "-c", CHILD, str(ROOT), str(folder), str(at)]
        done = subprocess.run(words, timeout=60, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        outcomes.append(loaded_step(folder))
    assert outcomes == sorted(outcomes)


# --------------------------------------------------------------------------- broken files

SPOILS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda p: p.write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[: -(len(p.read_bytes()) // 3)]),
    "zero tail": lambda p: p.write_bytes(_with_zero_tail(p.read_bytes())),
    "zero": lambda p: p.write_bytes(bytes(len(p.read_bytes()))),
    "first bit": lambda p: flip(p, 0),
    "a bit": lambda p: flip(p, len(p.read_bytes()) // 2),
}


def _with_zero_tail(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(
    "file", ["commit-20.json", "commit-20-g1/d0.json", "commit-20-g1/d0.safetensors"]
)
def test_a_broken_file_is_named_and_the_older_commit_loads(
    tmp_path: Path, file: str, spoil: str
) -> None:
    with_two_commits(folder := tmp_path / "commits")
    SPOILS[spoil](folder / file)
    said: list[str] = []
    found, unusable = load_commit(folder, "d0", ABOUT, said.append)
    assert found.record.step == 10
    assert found.image[:] == image(10, "d0")
    if (file, spoil) != ("commit-20.json", "missing"):
        assert file in said[0]
        assert "warning" in said[0].lower()
    if file != "commit-20.json":
        assert "WARNING: going back to the older checkpoint of step 10" in said
        assert [record.step for record in unusable] == [20]


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a pipe": pipe,
    "a folder": folder_instead,
    "nested": lambda p: p.write_text("[" * 50_000),
    "nested in a header": lambda p: p.write_bytes((50_000).to_bytes(8, "little") + b"[" * 50_000),
    "a header of 2^62": lambda p: p.write_bytes((1 << 62).to_bytes(8, "little") + bytes(90)),
    "no object": lambda p: p.write_bytes(b"[1, 2]"),
    "a number": lambda p: p.write_bytes(b"7"),
    "no text": lambda p: p.write_bytes(b"\xff\xfe" * 40),
}


@pytest.mark.parametrize("spoil", HOSTILE)
@pytest.mark.parametrize(
    "file", ["commit-20.json", "commit-20-g1/d0.json", "commit-20-g1/d0.safetensors"]
)
def test_files_of_others_are_passed_over(tmp_path: Path, file: str, spoil: str) -> None:
    with_two_commits(folder := tmp_path / "commits")
    HOSTILE[spoil](folder / file)
    said: list[str] = []
    found, _ = load_commit(folder, "d0", ABOUT, said.append)
    assert found.record.step == 10
    assert file in said[0]
    assert "\n" not in "".join(said)


@pytest.mark.parametrize("spoil", HOSTILE)
def test_a_fence_that_cannot_be_read_says_nothing(tmp_path: Path, spoil: str) -> None:
    with_two_commits(folder := tmp_path / "commits")
    HOSTILE[spoil](folder / "generation.json")
    assert CheckpointStore(folder).fence().generation == 1
    assert CheckpointStore(folder).fence().launcher is None
    assert load_commit(folder, "d0", ABOUT, print)[0].record.step == 20


def without_head(manifest: dict[str, Any]) -> None:
    del manifest["head"]


def without_tensors(manifest: dict[str, Any]) -> None:
    manifest["tensors"] = {}


def without_one(manifest: dict[str, Any]) -> None:
    del manifest["tensors"]["parameter:b"]


def elsewhere(manifest: dict[str, Any]) -> None:
    """Name other bytes, which are as they were: those that are loaded are not."""
    for entry in manifest["tensors"].values():
        entry["place"] = [0, 0]
        entry["sha256"] = digest(b"")


def as_list(manifest: dict[str, Any]) -> None:
    manifest["tensors"] = [1, 2]


def as_number(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["parameter:a"] = 7


MANIFESTS = [without_head, without_tensors, without_one, elsewhere, as_list, as_number]


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_manifest_that_leaves_bytes_unchecked_is_broken(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Sealed again, it has a right checksum; the tensor that it leaves out is another."""
    with_two_commits(folder := tmp_path / "commits")
    path = folder / "commit-20-g1" / "d0.json"
    manifest = unsealed(path.read_bytes(), "")
    change(manifest)
    path.write_bytes(sealed(manifest))
    entry = read_layout(image(20, "d0")).entries["parameter:b"]
    flip(path.with_suffix(".safetensors"), entry.start)
    record = json.loads((folder / "commit-20.json").read_text())
    record["devices"]["d0"] = digest(path.read_bytes())
    reseal(folder / "commit-20.json", record)
    said: list[str] = []
    found, _ = load_commit(folder, "d0", ABOUT, said.append)
    assert found.record.step == 10, said


def reseal(path: Path, body: dict[str, Any]) -> None:
    path.write_bytes(sealed({k: v for k, v in body.items() if k not in ("check", "format")}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "20"),
        ("generation", None),
        ("devices", ["d0"]),
        ("devices", {"d0": 1}),
        ("about", 1),
        ("folder", 3),
        ("folder", "../commit-1-g1"),
    ],
)
def test_a_record_of_other_types_is_broken(tmp_path: Path, field: str, value: object) -> None:
    with_two_commits(folder := tmp_path / "commits")
    path = folder / "commit-20.json"
    reseal(path, {**json.loads(path.read_text()), field: value})
    said: list[str] = []
    assert [record.step for record in CheckpointStore(folder).records(said.append)] == [10]
    assert "commit-20.json" in said[0]
