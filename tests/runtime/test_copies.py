"""Copies of a weight that drift apart end the run; tapes of steps show a wrong value."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.coded import InputError
from bigbrain_fx.runtime.compared_stream import Subject, require_same
from bigbrain_fx.runtime.hooked_device import Hooks
from bigbrain_fx.runtime.state import StateError
from bigbrain_fx.runtime.suspicion import is_drawn, require_repeatable
from bigbrain_fx.supervisor import FailedError
from bigbrain_fx.supervisor.suspicion import take_back
from bigbrain_fx.supervisor.votes import Votes
from tests.support import warm
from tests.support.bundles import cluster, copied, edit, split_small
from tests.support.replayed import supervised
from tests.support.taped import Rig, Wrong
from tools.conformance.matrix import imported

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


# --------------------------------------------------------------------------- tapes


STEPS = 3
WRONG = {
    Wrong("d0", 1, "activation", 1): r"message \d of activation",
    Wrong("d1", 1, "gradient"): r"message \d of gradient",
    Wrong("d0", 2, "bit"): r"message \d of",
    Wrong("d1", 2, "weight"): r"parameter:",
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two stages with a tied weight, under clipping."""
    options = Options("naive", schedule="1f1b", micro_batches=4)
    folder = split_small(
        tmp_path_factory.mktemp("taped"), cluster(2), options, extras=("suspicion",)
    )
    with imported(folder, force_adamw=False) as bundle:
        yield Rig(bundle)


@pytest.mark.nightly
def test_steps_that_are_right_come_out_the_same(rig: Rig) -> None:
    counted = rig.run(STEPS, 1.0)
    assert len(counted.checked) == 2 * STEPS
    assert not counted.found


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.kind)
def test_a_wrong_value_is_named_by_device_step_and_message(rig: Rig, wrong: Wrong) -> None:
    counted = rig.run(STEPS, 1.0, [wrong])
    assert list(counted.found) == [(wrong.device, wrong.step)]
    assert re.match(WRONG[wrong], counted.found[wrong.device, wrong.step])


def test_a_share_of_the_steps_is_drawn() -> None:
    drawn = [is_drawn(0.25, 7, "d1", step) for step in range(4000)]
    assert 900 < sum(drawn) < 1100
    assert drawn == [is_drawn(0.25, 7, "d1", step) for step in range(4000)]
    assert drawn != [is_drawn(0.25, 7, "d0", step) for step in range(4000)]
    assert all(is_drawn(1.0, 7, "d1", step) for step in range(100))


@pytest.mark.nightly
def test_a_bundle_whose_steps_depend_on_more_is_refused(rig: Rig) -> None:
    require_repeatable(rig.bundle)
    hooks: Any = Hooks()
    hooks.on_step_begin.append(print)
    with pytest.raises(StateError, match=r"on_step_begin.*leave --suspect out"):
        require_repeatable(replace(rig.bundle, hooks=hooks))
    with pytest.raises(StateError, match="has GPUs"):
        require_repeatable(replace(rig.bundle, kinds=("cpu", "cuda")))
