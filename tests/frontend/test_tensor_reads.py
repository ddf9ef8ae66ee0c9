"""What Python reads of tensors, and whether it asks them anything that decides what it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbrain_fx.frontend.tracing.opaque.tensor_access import TensorReads


def after(lines: Callable[[Tensor], object]) -> TensorReads:
    reads = TensorReads()
    with reads:
        lines(torch.tensor([1.0, -1.0, 2.0]))
    return reads


ASKING: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda x: 1 if (x > 0).any() else 2,
    "item": lambda x: x.max().item(),
    "numpy": lambda x: x.numpy(),
    "rows that a mask leaves": lambda x: len(x[x > 0]),
    "shape of what is picked": lambda x: x.masked_select(x > 0).exp().shape[0],
    "a loop over indices": lambda x: [*(x > 0).nonzero()],
}
PLAIN: dict[str, Callable[[Tensor], object]] = {
    "a mask": lambda x: x[x > 0].mean(),
    "its own shape": lambda x: x.shape[0] + len(x) + x.numel(),
    "a library's loss over what is picked": lambda x: F.mse_loss(x[x > 0], x[x > 0] + 1),
}


@pytest.mark.parametrize("what", ASKING)
def test_numbers_read_by_python_may_lead_elsewhere(what: str) -> None:
    assert after(ASKING[what]).asks


@pytest.mark.parametrize("what", PLAIN)
def test_values_that_stay_in_tensors_do_not(what: str) -> None:
    assert not after(PLAIN[what]).asks


def test_readers_are_listed_without_those_that_pass_on() -> None:
    a, b, c = torch.zeros(3, 2).unbind()
    reads = TensorReads()
    with reads:
        a + 1
    assert reads.numbers([a, b, c]) == {0}
    with reads:
        bool(a.any())
    assert reads.numbers([a, b, c]) == {0, 1, 2}
    assert reads.numbers([a, b, c], apart_from=[c]) == {0, 1}
