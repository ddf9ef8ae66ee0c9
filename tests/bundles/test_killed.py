"""A command that is killed at any of its writes leaves what was there, or what it was to make."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigbrain_fx
from bigbrain_fx.bundles import rollback
from bigbrain_fx.bundles.resplitting import resplit
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan, read_plan
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.weights import Copy, new_folder, read_header, replace_folder, write_joined
from tests.bundles.resplitting.test_resplit import train
from tests.support.bundles import MODEL, cluster
from tests.support.commit_disks import ABOUT, DEVICES, image, with_two_commits
from tools.conformance.matrix import Bench

MOST = 2000  # writes: more than any of these commands does
_TO_WRITE = os.O_WRONLY | os.O_RDWR
WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.")


def killed_in_turn(work: Callable[[], object], every: int = 1) -> Iterator[int]:
    """Do the work in a fork that is killed before its nth write, for n = 1, 2, ...; then whole."""
    for nth in range(1, MOST, every):
        pid = os.fork()
        if pid == 0:
            _do_until(nth, work)
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGKILL)
        yield nth
        if status == 0:
            return
    raise AssertionError("it never ends")


def _do_until(nth: int, work: Callable[[], object]) -> None:
    left = nth

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        flags = args[2] if event == "open" else 0
        if event.startswith(WRITES) or (isinstance(flags, int) and flags & _TO_WRITE):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.nightly
def test_rollback_goes_back_as_far_as_was_said_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    generation = with_two_commits(folder)
    for step in (30, 40):
        store = CheckpointStore(folder)
        parts = {d: store.write_part(d, image(step, d), generation) for d in DEVICES}
        store.commit(parts, generation, ABOUT)
    turns = killed_in_turn(lambda: rollback(folder, 10, print))
    newest = [CheckpointStore(folder).records(print)[0].step for _ in turns]
    assert newest[0] == 40
    assert newest[-1] == 10
    assert set(newest) == {40, 10}


@pytest.mark.nightly
def test_an_export_in_shards_is_one_when_its_index_is_there(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out" / "model.safetensors"
    save_file({f"t{i}": torch.full((4,), float(i)) for i in range(5)}, source)
    copies = [Copy(name, "float32", stored) for name, stored in read_header(source).items()]
    whole = []
    for _ in killed_in_turn(lambda: write_joined(copies, out, 32)):
        there = sorted(out.parent.glob("model*"))
        shards = [path for path in there if path.suffix == ".safetensors"]
        held = [name for path in shards for name in load_file(path)]  # each is whole
        whole.append(shards != there)
        assert not whole[-1] or sorted(held) == sorted(read_header(source))
        for path in there:
            path.unlink()
    assert whole[-1]
    assert not whole[0]


@pytest.mark.nightly
def test_new_weights_take_the_old_ones_place_in_one_step(tmp_path: Path) -> None:
    place = tmp_path / "weights"
    place.mkdir()
    (place / "old").touch()

    def work() -> None:
        new = new_folder(place)
        (new / "new").touch()
        replace_folder(place, new)

    seen = [[path.name for path in place.iterdir()] for _ in killed_in_turn(work)]
    assert seen[0] == ["old"]
    assert seen[-1] == ["new"]
    assert all(names in (["old"], ["new"]) for names in seen)


# ------------------------------------------------------------ commands that replace a bundle


EVERY = 11  # of some 380 writes one is the last; most are files that are copied or removed


def content(folder: Path) -> str:
    """Return a digest of all names and bytes in a folder."""
    parts = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            parts.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return parts.hexdigest()


def beside(folder: Path) -> list[str]:
    """Return the hidden names in a folder: what is not under its own name yet, or no more."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Path:
    """Return a bundle for two devices with a commit of step 3."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "letters.py").write_text(MODEL)
    options = Options("naive", schedule="1f1b", micro_batches=2)
    bundle = bigbrain_fx.split(folder / "letters.py", cluster(2), folder / "b0", options).bundle
    train(bundle, 3, "--checkpoint-dir", "commits")
    return bundle


@pytest.mark.nightly
def test_a_split_over_a_bundle_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(MODEL)
    file = load_model_file(tmp_path / "letters.py")
    bench = Bench(file, capture(file.model, file.example_batch, file.loss), 1)

    def plan(devices: int) -> Plan:
        source = Source(str(file.path), True, False, True, True, file.clip_norm, "")
        options = Options("naive", micro_batches=2)
        return make_plan(bench.captured.graph, cluster(devices), source, options)

    out, plans = tmp_path / "run", {devices: plan(devices) for devices in (1, 2)}
    write_bundle(plans[2], bench, out)
    old = content(out)
    turns = killed_in_turn(lambda: write_bundle(plans[1], bench, out, force=True), EVERY)
    seen = [content(out) for _ in turns]
    assert beside(tmp_path) == []
    assert read_plan(out).key == plans[1].key
    assert seen[0] == old
    assert set(seen) == {old, content(out)}


@pytest.mark.nightly
def test_a_resplit_in_its_own_place_leaves_the_run_as_it_was_or_moved(
    trained: Path, tmp_path: Path
) -> None:
    """It reads the very commit that it replaces."""

    def states() -> Iterator[tuple[int, int]]:
        for _ in killed_in_turn(lambda: resplit(trained, cluster(1), trained, force=True), EVERY):
            plan, commits = read_plan(trained), trained / "commits"
            (record, *_) = CheckpointStore(commits).records(print)
            held = [
                CheckpointStore(commits).load(record, d, {}, print) for d in plan.stages.devices
            ]
            yield len(held), record.step  # and the checksum of each tensor was compared

    seen = list(states())
    assert seen[0] == (2, 3)
    assert seen[-1] == (1, 3)
    assert seen == sorted(seen, reverse=True)
    assert beside(trained.parent) == []
    assert len(train(trained, 5, "--resume", "--checkpoint-dir", "commits")) == 2
