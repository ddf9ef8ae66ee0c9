"""Deaths at random: schedules, stages, micro-batches, intervals and places drawn from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bigbrain_fx.plan import Options, read_plan
from tests.support.bundles import cluster, split_small
from tests.support.replayed import Fault, supervised


def drawn(seed: int) -> tuple[int, Options, int]:
    """Return how many devices, the options of the split, and the steps between snapshots."""
    dice = random.Random(seed)
    devices, schedule = dice.choice((2, 3, 4)), dice.choice(("1f1b", "gpipe"))
    partitioner = dice.choice(("naive", "scattered"))
    options = Options(
        partitioner,
        schedule="list" if partitioner == "scattered" else schedule,
        micro_batches=dice.choice((1, 2, 4, 8)),
    )
    return devices, options, dice.choice((1, 2, 3, 5))


def deaths(seed: int, names: tuple[str, ...], steps: int, count: int, most: int) -> list[Fault]:
    """Return places of random deaths: some are never reached, and some are reached in a replay."""
    dice = random.Random(1000 + seed)
    places = [*range(most), "updated", "end"]
    return [
        Fault(dice.choice(names), dice.randrange(steps), dice.choice(places)) for _ in range(count)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_change_nothing(tmp_path: Path, seed: int) -> None:
    devices, options, every = drawn(seed)
    bundle = split_small(tmp_path, cluster(devices), options)
    names = read_plan(bundle).stages.devices
    steps = 6
    plain = supervised(bundle, tmp_path / "plain", names, steps, every=every)
    most = max(p["instructions"] for found in plain.processes.values() for p in found)
    faults = deaths(seed, names, steps, 6, most)
    seen = supervised(
        bundle, tmp_path / "chaos", names, steps, faults, every=every, restarts=100, spares=1
    )
    said = json.dumps([seed, devices, options.schedule, every, [vars(f) for f in faults]])
    assert seen.struck, said
    assert seen.losses == plain.losses, said
    assert seen.hashes == plain.hashes, said
