"""Tapes of steps and what computes them again: nothing wrong is missed, nothing right is blamed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.hooked_device import Hooks
from bigbrain_fx.runtime.state import StateError
from bigbrain_fx.runtime.suspicion import is_drawn, require_repeatable
from tests.support.bundles import cluster, split_small
from tests.support.taped import Rig, Wrong
from tools.conformance.matrix import imported

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


def test_a_bundle_whose_steps_depend_on_more_is_refused(rig: Rig) -> None:
    require_repeatable(rig.bundle)
    hooks: Any = Hooks()
    hooks.on_step_begin.append(print)
    with pytest.raises(StateError, match=r"on_step_begin.*leave --suspect out"):
        require_repeatable(replace(rig.bundle, hooks=hooks))
    with pytest.raises(StateError, match="has GPUs"):
        require_repeatable(replace(rig.bundle, kinds=("cpu", "cuda")))
