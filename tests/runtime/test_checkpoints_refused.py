"""Commits that are not loaded, by name and reason; generations, locks and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigbrain_fx.runtime.checkpoint_format import (
    BrokenError,
    CommitError,
    FencedError,
    graph_in,
    sealed,
    unsealed,
)
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.disk import locked
from bigbrain_fx.runtime.image import ImageError, read_layout
from tests.runtime.test_checkpoint_store import flip, loaded_step
from tests.support.commit_disks import (
    ABOUT,
    DEVICES,
    FullDisk,
    commit,
    image,
    load_commit,
    with_two_commits,
)


@pytest.mark.parametrize("tensor", ["parameter:a", "parameter:b", "buffer:n"])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_the_tensor_is_named(tmp_path: Path, tensor: str, how: str) -> None:
    with_two_commits(folder := tmp_path / "commits")
    (record, *_) = CheckpointStore(folder).records()
    whole = CheckpointStore(folder).load(record, "d0", ABOUT, print)
    path, entry = folder / "commit-20-g1/d0.safetensors", whole.layout.entries[tensor]
    if how == "flip":
        flip(path, entry.end - 1)
    else:
        path.write_bytes(path.read_bytes()[: entry.end - 1])
    with pytest.raises(BrokenError, match=rf"d0\.safetensors: .*tensor '{tensor}'"):
        CheckpointStore(folder).load(record, "d0", ABOUT, print)


def test_without_a_whole_checkpoint_nothing_is_started(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    for step in (10, 20):
        flip(folder / f"commit-{step}-g1/d0.safetensors", 600)
    said: list[str] = []
    with pytest.raises(
        CommitError, match="none of the 2 checkpoints is whole: nothing was started"
    ):
        load_commit(folder, "d0", ABOUT, said.append)
    assert len(said) == 2


def test_a_commit_that_could_not_be_loaded_is_not_one_of_the_two(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    flip(folder / "commit-20-g1/d0.safetensors", 600)
    _, unusable = load_commit(folder, "d0", ABOUT, print)
    store = CheckpointStore(folder)
    generation = store.begin_generation()
    parts = {d: store.write_part(d, image(15, d), generation) for d in DEVICES}
    store.commit(parts, generation, ABOUT)
    assert store.prune(generation, unusable=unusable) == ["commit-15-g2", "commit-10-g1"]
    assert loaded_step(folder) == 15


def test_a_commit_that_is_needed_stays_beside_the_newest(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    store = CheckpointStore(folder)
    generation = store.begin_generation()
    parts = {d: store.write_part(d, image(30, d), generation) for d in DEVICES}
    store.commit(parts, generation, ABOUT)
    kept = store.prune(generation, keep=1, needed=["commit-10-g1"])
    assert kept == ["commit-30-g2", "commit-10-g1"]
    assert (folder / "commit-10-g1" / "d0.safetensors").is_file()
    assert not (folder / "commit-20-g1").exists()


@pytest.mark.parametrize("field", ["plan", "graph"])
def test_a_commit_of_something_else_is_refused(tmp_path: Path, field: str) -> None:
    with_two_commits(folder := tmp_path / "commits")
    with pytest.raises(CommitError, match=f"{field}: expected 'other', found '{ABOUT[field]}'"):
        load_commit(folder, "d0", {**ABOUT, field: "other"}, print)


def test_a_commit_of_other_devices_is_refused(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    with pytest.raises(CommitError, match=r"device: expected gpu0, found d0, d1: .*resplit"):
        load_commit(folder, "gpu0", ABOUT, print)


def test_another_torch_is_a_warning(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    said: list[str] = []
    load_commit(folder, "d0", {**ABOUT, "torch": "2.13.1+cpu"}, said.append)
    assert said == []
    load_commit(folder, "d0", {**ABOUT, "torch": "2.14.0"}, said.append)
    assert "made with torch 2.13.0, this is 2.14.0" in said[0]


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbrain_fx.runtime.checkpoint_format.FORMAT", 2)
    with_two_commits(folder := tmp_path / "commits")
    monkeypatch.undo()
    with pytest.raises(CommitError, match="format: expected 1, found 2"):
        load_commit(folder, "d0", ABOUT, print)


@pytest.mark.parametrize(
    "link", ["", "commit-20.json", "commit-20-g1", "commit-20-g1/d0.safetensors"]
)
def test_symbolic_links_are_refused(tmp_path: Path, link: str) -> None:
    with_two_commits(folder := tmp_path / "commits")
    path = folder / link if link else folder
    real = path.rename(tmp_path / "real")
    path.symlink_to(real)
    with pytest.raises(CommitError, match="is a symbolic link"):
        load_commit(folder, "d0", ABOUT, print)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    path = folder / "commit-20-g1/d0.safetensors"
    path.unlink()
    os.mkfifo(path)
    found, _ = load_commit(folder, "d0", ABOUT, print)
    assert found.record.step == 10


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        CommitError, match="comits is not there: give the folder that --checkpoint-dir"
    ):
        load_commit(tmp_path / "comits", "d0", ABOUT, print)


def test_pickled_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CommitError, match=r"no checkpoint \(model.pt: pickled files are code"):
        load_commit(tmp_path, "d0", ABOUT, print)


def test_a_folder_that_others_may_write_is_warned_about(tmp_path: Path) -> None:
    folder, said = tmp_path / "commits", list[str]()
    CheckpointStore(folder).prepare(said.append)
    assert said == []
    folder.chmod(0o777)
    CheckpointStore(folder).prepare(said.append)
    assert "everyone on this host can write in" in said[0]


@pytest.mark.skipif(os.getuid() != 0, reason="giving files away needs root")
def test_a_folder_of_someone_else_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    os.chown(tmp_path, 1234, 1234)
    CheckpointStore(tmp_path).prepare(said.append)
    assert "belongs to user 1234" in said[0]


def test_an_older_generation_writes_nothing_more(tmp_path: Path) -> None:
    old = with_two_commits(folder := tmp_path / "commits")
    store = CheckpointStore(folder)
    parts = {d: store.write_part(d, image(30, d), old) for d in DEVICES}
    new = CheckpointStore(folder).begin_generation()
    before = sorted(folder.rglob("*"))
    for attempt in (
        lambda: CheckpointStore(folder).write_part("d0", image(40, "d0"), old),
        lambda: store.commit(parts, old, ABOUT),
        lambda: store.prune(old),
    ):
        with pytest.raises(FencedError, match=f"generation {old} was replaced by {new}"):
            attempt()
    assert sorted(folder.rglob("*")) == before
    assert loaded_step(folder) == 20


def test_generations_go_up_also_when_the_fence_is_broken(tmp_path: Path) -> None:
    with_two_commits(folder := tmp_path / "commits")
    flip(folder / "generation.json", 20)
    assert CheckpointStore(folder).fence().generation == 1
    assert CheckpointStore(folder).begin_generation() == 2


@pytest.mark.parametrize("depth", [900, 993, 5_000])
def test_json_of_any_depth_is_broken_and_no_more(depth: int) -> None:
    """It may be read and yet be too deep for its checksum to be made."""
    text = '{"format": 1, "check": "", "a": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(BrokenError):
        unsealed(text.encode(), "it")


def test_a_number_without_end_is_no_size() -> None:
    head = b'{"__metadata__": {"facts": "{}"}, "a": {"dtype": "F32", "shape": [1e999], '
    head += b'"data_offsets": [0, 4]}}'
    with pytest.raises(ImageError, match="its header cannot be read"):
        read_layout(len(head).to_bytes(8, "little") + head + bytes(4))


@pytest.mark.parametrize("text", ["", '{"graph": ', "[]", "{}", "[" * 5_000, None])
def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "plan.json"
    os.mkfifo(path) if text is None else path.write_text(text)
    with pytest.raises(CommitError, match="is not as it was written: copy the bundle again"):
        graph_in(tmp_path)


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(OSError, match="another process has locked it") as error,
        locked(tmp_path, wait_s=0.05),
    ):
        pytest.fail("both have it")
    assert str(error.value.filename) == str(tmp_path / ".lock")
    with locked(tmp_path, wait_s=0.0):
        pass


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    generation, disk = with_two_commits(folder := tmp_path / "commits"), FullDisk()
    disk.full = True
    with pytest.raises(OSError, match="No space left"):
        CheckpointStore(folder, disk).write_part("d0", image(30, "d0"), generation)
    assert not list((folder / "commit-30-g1").iterdir())
    assert loaded_step(folder) == 20
    disk.full = False
    commit(folder, 30, generation, disk)
    assert loaded_step(folder) == 30


def test_a_record_of_another_step_is_no_record_of_these_files(tmp_path: Path) -> None:
    """A run would begin at that step, with the state of the other."""
    with_two_commits(folder := tmp_path / "commits")
    path = folder / "commit-20.json"
    whole = unsealed(path.read_bytes(), "a test")
    path.write_bytes(sealed({**whole, "step": 23}))
    said: list[str] = []
    assert [record.step for record in CheckpointStore(folder).records(said.append)] == [10]
    assert "it is no record of a checkpoint" in said[0]
    (folder / "commit-20-g1").rename(folder / "commit-23-g1")
    path.write_bytes(sealed({**whole, "step": 23, "folder": "commit-23-g1"}))
    assert loaded_step(folder, said) == 10
    assert "it is of step 20, and the record of step 23" in said[-2]


def test_parts_of_a_commit_that_was_missed_go(tmp_path: Path) -> None:
    """The next one needs the room, which the parts of some devices would take for ever."""
    generation = with_two_commits(folder := tmp_path / "commits")
    store = CheckpointStore(folder)
    store.write_part("d1", image(30, "d1"), generation)
    store.drop(30, generation)
    store.drop(40, generation)  # of which nothing was written
    assert not (folder / "commit-30-g1").exists()
    assert loaded_step(folder) == 20


def test_a_record_that_is_set_aside_counts_when_it_is_renamed(tmp_path: Path) -> None:
    generation = with_two_commits(folder := tmp_path / "commits")
    store = CheckpointStore(folder)
    parts = {d: store.write_part(d, image(30, d), generation) for d in DEVICES}
    store.commit(parts, generation, ABOUT, aside=True)
    assert loaded_step(folder) == 20
    (folder / "commit-30.json.set-aside").rename(folder / "commit-30.json")
    assert loaded_step(folder) == 30
