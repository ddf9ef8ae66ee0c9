"""Sums of gradients: nobody else's memory is written into, and they lie as `.grad` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime.gradients import StepSums
from bigbrain_fx.runtime.modules import HeldWeights


def held(**parameters: Any) -> HeldWeights:
    found = HeldWeights("d0", {}, {})
    found.parameters, found.of_stage = dict(parameters), {0: [*parameters]}
    return found


def test_sums_leave_what_somebody_has_kept() -> None:
    """As a hook of the user's does that looks at gradients after the step."""
    kept = [torch.randn(4, 3) for _ in range(3)]
    before = [gradient.clone() for gradient in kept]
    sums = StepSums(held(weight=nn.Parameter(torch.ones(4, 3))))
    for gradient in kept:
        sums.add("weight", 0, gradient)
    assert all(map(torch.equal, kept, before))
    assert torch.equal(sums.gradients["weight", 0], before[0] + before[1] + before[2])


def test_a_gradient_of_two_parameters_becomes_one_of_each() -> None:
    """Of one micro-batch nothing is added up; an optimizer may write into what it is given."""
    a, b = (nn.Parameter(torch.ones(2, 4)) for _ in "ab")
    sums = StepSums(held(a=a, b=b))
    made = torch.autograd.grad((torch.randn(2, 4) * (a + b)).sum(), [a, b])
    for name, gradient in zip("ab", made, strict=True):
        sums.add(name, 0, gradient)
    found = sums.summed()
    assert torch.equal(found["a"], found["b"])
    found["a"].zero_()
    assert found["b"].count_nonzero() == found["b"].numel()


@pytest.mark.parametrize("micros", [1, 3])
def test_gradients_lie_as_those_of_backward_do(micros: int) -> None:
    """A norm adds in the order of memory: of a transposed gradient it would have other bits."""
    stacked = nn.Parameter(torch.randn(3, 8, 8))
    repeated, turned = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 8).t())
    named = {"stacked": stacked, "repeated": repeated, "turned": turned}
    sums = StepSums(held(**named))
    for _ in range(micros):
        y = torch.einsum("bd,ekd->bk", torch.randn(4, 8), stacked) @ turned + repeated.sum()
        made = torch.autograd.grad(y.square().sum(), [*named.values()], retain_graph=True)
        y.square().sum().backward()
        for name, gradient in zip(named, made, strict=True):
            sums.add(name, 0, gradient)
    found = sums.summed()
    for name, parameter in named.items():
        grad: Tensor | None = parameter.grad
        assert grad is not None
        assert torch.equal(found[name], grad), name
        assert found[name].stride() == grad.stride(), name
