"""Copies of a weight that drift apart end the run: stages share it, replicas, tensor groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.coded import InputError
from bigbrain_fx.runtime.compared_stream import Subject, require_same
from bigbrain_fx.supervisor import FailedError
from bigbrain_fx.supervisor.suspicion import take_back
from bigbrain_fx.supervisor.votes import Votes
from tests.support import warm
from tests.support.bundles import copied, edit, split_small
from tests.support.replayed import supervised

UPDATED = "        optimizer.zero_grad(set_to_none=True)\n"
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({}, "the copies of embed.weight after step 1 differ between devices"),
    "replicas": ({"replicas": 2}, "after step 1 differ between devices"),
    "group": ({"tensor": 2}, "the copies of what d0, d1 hold whole after step 1 differ"),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for way, (choices, _) in WAYS.items():
        options = Options("naive", schedule="1f1b", micro_batches=4, **choices)
        found[way] = split_small(tmp_path_factory.mktemp(way), options=options)
    return found


def rounding_otherwise(bundle: Path, folder: Path) -> Path:
    """Return a bundle whose second device rounds one number of a shared weight up, in step 1."""
    copy = copied(bundle, folder)
    nudge = """
        if self.name == "d1" and self.step == 1:
            name = "norm.weight" if self.members else "embed.weight"
            one = self.parameters[name].data.view(-1)[:1]
            one.copy_(torch.nextafter(one, one + 1))
"""
    edit(copy / "runtime" / "pipeline_device.py", UPDATED, UPDATED + nudge.removeprefix("\n"))
    return copy


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_one_bit_of_one_copy_ends_the_run(
    bundles: dict[str, Path], tmp_path: Path, way: str
) -> None:
    copy = rounding_otherwise(bundles[way], tmp_path)
    words = [sys.executable, "train.py", "--in-process", "--steps", "4"]
    done = warm.run(words, cwd=copy, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert WAYS[way][1] in done.stderr
    assert "Split again so that one computes it" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_under_a_supervisor(bundles: dict[str, Path], tmp_path: Path) -> None:
    copy = rounding_otherwise(bundles["replicas"], tmp_path)
    with pytest.raises(FailedError, match="its input cannot be used") as failed:
        supervised(copy, tmp_path / "run", ("d0", "d1"), 6)
    assert "after step 1 differ" in str(failed.value.death.text)


@pytest.mark.nightly
def test_only_bundles_with_copies_take_the_file_along(tmp_path: Path) -> None:
    for way, kept in (
        ({"replicas": 2}, True),
        ({"pins": (("embed", "d0"), ("head", "d0"))}, False),
    ):
        folder = tmp_path / str(kept)
        folder.mkdir()
        bundle = split_small(folder, options=Options("naive", micro_batches=4, **way))
        assert (bundle / "runtime" / "copies.py").exists() == kept


def test_a_copy_is_told_from_a_batch() -> None:
    with pytest.raises(InputError, match="before d0 was replaced"):
        require_same(Subject(3, "w"), "d0 12", "d0 34")


def test_a_step_done_again_with_other_replicas_is_compared_anew() -> None:
    votes = Votes(frozenset({"a", "b"}))
    copies = [f"the copies of w after step {step}" for step in (3, 4)]
    for what in (*copies, "the batch of step 4"):
        votes.first(what, "first")
    take_back(votes, 4)
    assert [votes.first(what, "now") for what in copies] == ["first", "now"]
    assert votes.first("the batch of step 4", "now") == "first"
    votes.forget_steps(before=4)
    assert votes.first(copies[0], "later") == "later"
