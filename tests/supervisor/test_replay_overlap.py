"""Deaths and stops while steps overlap: what was under way is made again, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import bigbrain_fx
from bigbrain_fx.core import Asynchronous
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.asynchronous import AsynchronousDevice
from bigbrain_fx.runtime.snapshots import _is_due
from bigbrain_fx.runtime.worker import _goes_on
from tests.support.bundles import MODEL, cluster, edit
from tests.support.replayed import Fault, Seen, supervised
from tests.support.training import untied

NAMES = ("d0", "d1", "d2")
STEPS, EMPTY = 8, 3  # steps 2, 5 and 7 end with nothing under way
FAULTS = (
    Fault("d1", 1, 9),  # in the middle of two steps that overlap
    Fault("d0", 3, "updated"),
    Fault("d2", 4, 6),
    Fault("d0", 6, 14),
)


def overlapping(folder: Path, mode: Asynchronous) -> Path:
    folder.mkdir()
    (folder / "letters.py").write_text(untied(MODEL))
    options = Options("naive", micro_batches=4, asynchronous=mode)
    bundle = bigbrain_fx.split(folder / "letters.py", cluster(3), folder / "bundle", options).bundle
    edit(bundle / "runtime" / "asynchronous.py", "empties_every = 8", f"empties_every = {EMPTY}")
    return bundle


def run(bundle: Path, folder: Path, faults: Sequence[Fault] = (), **more: object) -> Seen:
    return supervised(bundle, folder, NAMES, STEPS, faults, **more)  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["2bw", "stash"])
def test_devices_that_die_while_steps_overlap_are_replayed(
    tmp_path: Path, mode: Asynchronous
) -> None:
    bundle = overlapping(tmp_path / "made", mode)
    undisturbed = run(bundle, tmp_path / "undisturbed")
    assert {e["step"] for e in undisturbed.of("epoch")} <= {3, 6}
    seen = run(bundle, tmp_path / "faults", FAULTS)
    died = sorted(event["device"] for event in seen.of("died"))  # steps overlap: in any order
    assert died == sorted(fault.device for fault in FAULTS)
    assert seen.losses == undisturbed.losses
    assert seen.hashes == undisturbed.hashes


def test_a_step_runs_into_the_next_by_its_number_alone() -> None:
    commits = SimpleNamespace(is_due=lambda step: step == 4)
    every = AsynchronousDevice.empties_every
    found = [step for step in range(20) if _goes_on(every, 20, commits, step)]  # type: ignore[arg-type]
    assert found == [step for step in range(20) if step not in (4, 7, 15, 19)]


def test_snapshots_are_of_the_first_step_that_can_be_since_one_was_due() -> None:
    assert [s for s in range(1, 13) if _is_due(s, 3, 1)] == [3, 6, 9, 12]
    assert [s for s in range(1, 33) if _is_due(s, 3, 8)] == [8, 16, 24, 32]
    assert [s for s in range(1, 49) if _is_due(s, 20, 8)] == [24, 40]
