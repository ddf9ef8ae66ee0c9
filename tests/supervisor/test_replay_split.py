"""Deaths between a backward and that of its weights: what waited is made again, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.plan import Options, read_plan
from bigbrain_fx.plan.schedule.faults import cell
from tests.support.bundles import cluster, split_small
from tests.support.replayed import Fault, supervised

pytestmark = pytest.mark.nightly


NAMES = ("d0", "d1", "d2")
STEPS = 5


def test_devices_that_die_with_gradients_waiting_are_replayed(tmp_path: Path) -> None:
    whole = split_small(_made(tmp_path / "whole"), cluster(3), Options("naive", micro_batches=4))
    options = Options("naive", schedule="zb-h1", micro_batches=4)
    split = split_small(_made(tmp_path / "split"), cluster(3), options)
    assert (split / "runtime" / "deferred.py").exists()
    assert not (whole / "runtime" / "deferred.py").exists()
    undisturbed = supervised(whole, tmp_path / "undisturbed", NAMES, STEPS)
    faults = [
        Fault("d1", 2, before(split, "d1", "W1.0")),
        Fault("d2", 3, before(split, "d2", "W2.3")),
        Fault("d0", 4, before(split, "d0", "F0.3")),
    ]
    seen = supervised(split, tmp_path / "faults", NAMES, STEPS, faults)
    assert [event["device"] for event in seen.of("died")] == ["d1", "d2", "d0"]
    assert seen.losses == undisturbed.losses
    assert seen.hashes == undisturbed.hashes


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def before(bundle: Path, device: str, name: str) -> int:
    """Return how many instructions come before one in a device's program."""
    (program,) = [p for p in read_plan(bundle).programs if p.device == device]
    return [cell(instruction) for instruction in program.instructions].index(name)
