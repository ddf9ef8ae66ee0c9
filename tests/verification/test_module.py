"""What two sets of gradients have in common is told from what rounding leaves of a zero."""

from __future__ import annotations

import torch

from bigbrain_fx.verification.trace import left_of_zero

SINGLE, DOUBLE = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def test_a_rounded_zero_is_in_both_and_tiny() -> None:
    """A bias that both sides of a distance have: two orders of adding leave unlike last digits."""
    want = {"weight": torch.tensor([0.5, -2.0]), "bias": torch.tensor([3e-8, -1e-8])}
    have = {"weight": torch.tensor([0.5, -2.0]), "bias": torch.tensor([-2e-8, 4e-8])}
    assert left_of_zero(want, have, SINGLE) == {"bias"}
    assert left_of_zero(want, have, DOUBLE) == frozenset()  # there it is a number
    assert left_of_zero(want, {**have, "bias": torch.tensor([0.1, 0.0])}, SINGLE) == frozenset()
    assert left_of_zero(want, {"weight": have["weight"]}, SINGLE) == frozenset()
    assert left_of_zero({"weight": torch.zeros(2)}, {"weight": torch.zeros(2)}, SINGLE) == set()
