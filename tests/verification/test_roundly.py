"""What rounding alone explains: runs that add in unlike orders, and what it leaves of a zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bigbrain_fx.bundles.verifying import Check
from bigbrain_fx.verification.trace import (
    Trace,
    left_of_zero,
    outputs_to_rounding,
    same_to_rounding,
)

BEFORE = {"a": torch.ones(4, 4), "b": torch.zeros(8), "count": torch.tensor(0)}
EPS = torch.finfo(torch.float32).eps
LIMITS = ("allowed 0.001", "allowed 1e-06", "allowed 0.05")


def trained(part: float = 1.0, off: float = 0.0) -> Trace:
    """Return a run whose gradients are so much of what they should be, rounded so far off."""
    dice = torch.Generator().manual_seed(1)
    gradients = {"a": torch.randn(4, 4, generator=dice), "b": torch.full((8,), 1e-9)}
    made = {name: part * g * (1 + off) for name, g in gradients.items()}
    tensors: Mapping[str, Tensor] = {
        "a": BEFORE["a"] - 0.1 * made["a"],
        "b": BEFORE["b"] - 0.1 * torch.sign(torch.randn(8, generator=dice) + off),  # Adam's way
        "count": torch.tensor(3),
    }
    return Trace([torch.tensor(2.0 * (1 + off), dtype=torch.float64)], made, dict(tensors))


def passed(actual: Trace, unit: float = EPS) -> list[object]:
    return [check["passed"] for check in same_to_rounding(BEFORE, trained(), actual, unit)]


def test_a_rounding_difference_passes_with_its_size() -> None:
    checks = same_to_rounding(BEFORE, trained(), trained(off=3e-7), EPS)
    assert [check["passed"] for check in checks] == [True] * 3
    assert all(limit in str(check["detail"]) for limit, check in zip(LIMITS, checks, strict=True))
    assert "1 whose gradient may be rounding alone not compared" in str(checks[2]["detail"])


@pytest.mark.parametrize("part", [0.5, 2.0, -1.0, float("nan")])
def test_a_replica_that_is_left_out_or_counted_twice_is_no_rounding(part: float) -> None:
    assert passed(trained(part)) == [True, False, False]
    assert passed(trained(part), unit=7.8e-3) == [True, False, False]  # nor in 16 bits


def test_losses_weights_and_what_is_missing_count_by_themselves() -> None:
    other = trained()
    assert passed(replace(other, losses=[other.losses[0] * 1.01])) == [False, True, True]
    wrong = {**other.tensors, "count": torch.tensor(4)}
    assert passed(replace(other, tensors=wrong)) == [True, True, False]
    assert passed(replace(other, unlike={"a"})) == [True, True, False]
    assert passed(replace(other, tensors={}, gradients={})) == [True, False, False]


def test_outputs_of_compiled_stages_are_never_said_to_be_equal() -> None:
    want = {"y": torch.tensor([1.0, -4.0, float("inf")]), "best": torch.tensor([2])}
    near = {**want, "y": want["y"] * (1 + 1e-6)}
    check = outputs_to_rounding("outputs", [want], [near], EPS)
    assert Check(**check).word == "to rounding"  # type: ignore[arg-type]
    assert "at most 9" in str(check["detail"]) or "at most 1.0e-06" in str(check["detail"])
    for other in ({"y": want["y"] * 1.01}, {"y": -want["y"]}, {"best": torch.tensor([1])}):
        check = outputs_to_rounding("outputs", [want], [{**want, **other}], EPS)
        assert Check(**check).word == "DIFFERENT"  # type: ignore[arg-type]
    assert not outputs_to_rounding("outputs", [want], [{}], EPS)["passed"]


def test_compiled_stages_may_be_further_off_than_sums_in_another_order() -> None:
    far = trained(off=1e-5)
    checks = same_to_rounding(BEFORE, trained(), far, EPS, compiled=True)
    assert [Check(**c).word for c in checks] == ["to rounding"] * 3  # type: ignore[arg-type]
    assert passed(far) == [True, False, True]
    half = same_to_rounding(BEFORE, trained(), trained(0.5), EPS, compiled=True)
    assert [check["passed"] for check in half] == [True, False, False]


# --------------------------------------------------------------------------- zeros


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
