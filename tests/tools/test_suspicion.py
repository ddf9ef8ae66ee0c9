"""What `tools.suspicion` counts and writes."""

from __future__ import annotations

import random

import pytest

from tools.suspicion import KINDS, Tally, drawn_wrong, wilson
from tools.taped import Counted, Wrong


def test_a_trial_counts_where_its_fault_is_found_and_nowhere_else() -> None:
    wrong = Wrong("d1", 3, "bit")
    found = Counted([("d1", 3)], {("d1", 3): "message 0", ("d2", 4): "message 1"}, {wrong})
    missed = Counted([("d0", 0)], {}, {wrong})
    assert Tally.of([(wrong, found), (wrong, missed)]) == Tally(1, 2, 1, 2)
    with pytest.raises(RuntimeError, match="found no place"):
        Tally.of([(wrong, Counted())])


def test_an_interval_holds_its_share() -> None:
    low, high = wilson(5, 20)
    assert 0.1 < low < 0.25 < high < 0.5
    assert wilson(0, 20)[0] == pytest.approx(0.0)
    assert wilson(20, 20)[1] == pytest.approx(1.0)


def test_the_first_device_sends_no_gradient_and_the_last_no_activation() -> None:
    dice = random.Random(0)
    for kind in KINDS:
        drawn = {drawn_wrong(dice, kind, 5).device for _ in range(200)}
        assert ("d0" in drawn) == (kind != "gradient")
        assert ("d3" in drawn) == (kind != "activation")
