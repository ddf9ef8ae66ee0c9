"""Deaths where two replicas share devices: the state comes from the device in the same place."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.plan import Options
from tests.supervisor.test_peer_states import ALONE, MICROS, named, require_same
from tests.support.bundles import MODEL, cluster
from tests.support.replayed import Fault, supervised


def split(folder: Path, devices: int) -> Path:
    """Split the model, untied and without dropout, with sums in the order of one process."""
    text = MODEL
    for old, new in ALONE.items():
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "letters.py").write_text(text)
    options = Options("naive", schedule="gems", micro_batches=MICROS, sum_order="micro")
    where = cluster(devices)
    return bigbrain_fx.split(folder / "letters.py", where, folder / "bundle", options).bundle


@pytest.mark.nightly
def test_no_place_of_a_step_is_a_bad_one(tmp_path: Path) -> None:
    """Also that between the sums of both replicas; d3 holds what d0 does, and d2 what d1 does."""
    bundle = split(tmp_path / "made", 4)
    places: list[tuple[str, int | str]] = [("d0", 0), ("d3", 3), ("d1", 8), ("d2", 13)]
    places += [("d0", 19), ("d3", "updated"), ("d1", "end"), ("d2", "updated")]
    faults = [Fault(name, step, at) for step, (name, at) in enumerate(places, 1)]
    run, steps = tmp_path / "run", len(places) + 2
    seen = supervised(bundle, run, named(4), steps, faults, every=None)
    assert len(seen.struck) == len(faults)
    assert {(e["device"], e["peers"]) for e in seen.of("took_state")} == {
        ("d0", "d3"),
        ("d1", "d2"),
        ("d2", "d1"),
        ("d3", "d0"),
    }
    require_same(seen, run, bundle, steps)
