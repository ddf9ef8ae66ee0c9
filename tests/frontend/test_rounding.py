"""Gradients that differ by rounding alone are the same; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.executor.tolerance import (
    allowed,
    coarsest,
    differences,
    distance,
    exact_gradients,
)

FLOAT32, BFLOAT16 = coarsest([torch.float32]), coarsest([torch.bfloat16, torch.float32])


def test_the_tolerance_follows_the_coarsest_type() -> None:
    assert allowed(FLOAT32) == 1e-6
    assert allowed(coarsest([torch.float64, torch.float32])) == 1e-6
    assert allowed(coarsest([])) == 1e-6
    assert allowed(BFLOAT16) == pytest.approx(8 * 2**-7)
    assert allowed(coarsest([torch.float16, torch.int64])) == pytest.approx(8 * 2**-10)


@pytest.mark.parametrize(("off", "differs"), [(5e-7, False), (2e-6, True)])
def test_without_an_exact_gradient_the_tolerance_decides(off: float, differs: bool) -> None:
    want = {"w": torch.tensor([1.0, -0.25])}
    have = {"w": torch.tensor([1.0 + off, -0.25])}
    assert bool(list(differences(want, have, FLOAT32))) is differs


def test_as_near_to_the_exact_gradient_as_the_modules_own() -> None:
    exact = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    want = {"w": torch.tensor([1.00001, 2.0])}
    near, far = {"w": torch.tensor([0.99999, 2.0])}, {"w": torch.tensor([0.9999, 2.0])}
    assert not list(differences(want, near, FLOAT32, lambda: exact))
    (line,) = differences(want, far, FLOAT32, lambda: exact)
    assert line.startswith("gradient of w differs by 5.")
    assert "allowed 1e-06" in line


def test_an_exact_run_of_something_else_excuses_nothing() -> None:
    """Other random numbers in float64: its gradients are far from the module's own."""
    other = {"w": torch.tensor([-3.0, 7.0], dtype=torch.float64)}
    want, have = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.1, 2.0])}
    assert list(differences(want, have, FLOAT32, lambda: other))


def test_a_missing_gradient_is_zero_and_nan_is_far() -> None:
    assert distance(None, None) == 0.0
    assert distance(torch.ones(2), None) == 1.0
    assert distance(torch.full((2,), torch.nan), torch.full((2,), torch.nan)) == 0.0
    assert distance(torch.full((2,), torch.nan), torch.ones(2)) == float("inf")
    assert list(differences({"w": torch.ones(2)}, {}, FLOAT32))


class Halved(nn.Module):
    """A step: it returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.drop(self.linear(x)).square().mean(),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_gradient_is_that_of_float64_under_the_same_dice(dtype: torch.dtype) -> None:
    step, x = Halved(dtype), torch.randn(8, 4, dtype=dtype)
    torch.default_generator.manual_seed(3)
    own = torch.autograd.grad(step(x)[0], list(step.parameters()))
    names = ["linear.weight", "linear.bias"]
    exact = exact_gradients(step, step, [x], names, 3)
    assert exact is not None
    for name, gradient in zip(names, own, strict=True):
        found = exact[name]
        assert found is not None
        assert found.dtype is torch.float64
        assert distance(gradient, found) < 20 * coarsest([dtype]) * float(gradient.abs().max())
    assert step.linear.weight.dtype is dtype


class Stubborn(Halved):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.linear(x.float()).mean(),)


def test_a_module_that_insists_on_its_type_has_no_exact_gradient() -> None:
    step = Stubborn(torch.float32)
    assert exact_gradients(step, step, [torch.ones(2, 4)], ["linear.weight"], 0) is None
