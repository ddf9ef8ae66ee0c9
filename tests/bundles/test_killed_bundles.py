"""Commands that replace a bundle, killed at any write: the old one is there, or the new."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.bundles.resplitting import resplit
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan, read_plan
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from tests.bundles.resplitting.test_resplit import train
from tests.bundles.test_killed import killed_in_turn
from tests.support.bundles import MODEL, cluster
from tools.conformance.matrix import Bench

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
