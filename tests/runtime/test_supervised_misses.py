"""Commits that cannot be written under a supervisor: events, deaths meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.supervisor import FailedError, status
from tests.support.bundles import copied, edit
from tests.support.commit_disks import steps_in
from tests.support.replayed import Fault, Seen, supervised

NAMES = ("d0", "d1")
STEPS = 8
FULL = """if "commits/commit-4" in str(path) or "commits/commit-6" in str(path):
            raise OSError(28, "No space left on device")
        flags = """


@pytest.fixture(scope="module")
def calm(trained_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return supervised(trained_bundle, tmp_path_factory.mktemp("calm"), NAMES, STEPS)


@pytest.mark.gate("")
@pytest.mark.parametrize("faults", [[], [Fault("d1", 4, 2), Fault("d0", 5, 2)]], ids=["", "deaths"])
def test_misses_are_events(
    trained_bundle: Path, tmp_path: Path, calm: Seen, faults: list[Fault]
) -> None:
    copy = copied(trained_bundle, tmp_path)
    edit(copy / "runtime" / "disk.py", "flags = ", FULL)
    more = ("--checkpoint-dir", str(tmp_path / "commits"), "--checkpoint-every", "2")
    seen = supervised(copy, tmp_path / "run", NAMES, STEPS, faults, more_words=more)
    assert seen.hashes == calm.hashes
    told = [(entry["step"], entry["row"]) for entry in seen.of("missed")]
    assert sorted(set(told))[:2] == [(4, 1), (6, 2)]
    assert [entry["missed"] for entry in seen.of("committed_again")] == [2]
    assert all(entry["newest"] >= 2 for entry in seen.of("missed"))  # also after the leader died
    assert steps_in(tmp_path / "commits") == [STEPS, 2]
    lines = [line for entry in seen.events if (line := status(entry)) and "WARNING" in line]
    assert len([line for line in lines if "no checkpoint at step" in line]) == len(
        [row for _, row in told if row == 1]
    )


@pytest.mark.nightly
def test_a_run_ends_whose_commits_were_taken_over(trained_bundle: Path, tmp_path: Path) -> None:
    """As `rollback` does it, or a second `run --resume`: both begin a new generation."""
    copy = copied(trained_bundle, tmp_path)
    at = "        return record\n\n    # "
    taken = f"        if step == 2:\n            self.begin_generation()\n{at}"
    edit(copy / "runtime" / "checkpoint_store.py", at, taken)
    more = ("--checkpoint-dir", str(tmp_path / "commits"), "--checkpoint-every", "2")
    with pytest.raises(FailedError, match="rollback has taken over its checkpoints") as failed:
        supervised(copy, tmp_path / "run", NAMES, 100, more_words=more)
    assert failed.value.death.code == 77
    assert not failed.value.moves
    logs = [file.read_text() for file in (tmp_path / "run").rglob("*.log")]
    assert "generation 1 was replaced by 2" in "".join(logs)
    assert "training goes on" not in "".join(logs)
