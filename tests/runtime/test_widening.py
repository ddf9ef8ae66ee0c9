"""A float weight of an int8 one: the same numbers, in memory that nobody else has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bigbrain_fx.runtime import again, widened, widening
from bigbrain_fx.runtime.promises import making_again

DICE = torch.Generator().manual_seed(2)
WEIGHTS = torch.randint(-127, 128, (3, 24, 16), generator=DICE, dtype=torch.int8)
SCALES = torch.rand(3, 24, 1, generator=DICE)
PAIRS = tuple(zip(WEIGHTS, SCALES, strict=True))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "_free_or_read", {})


def storages() -> int:
    return sum(map(len, widening._free_or_read.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_widened_product_is_bitwise_equal(dtype: torch.dtype) -> None:
    for weight, scale in zip(WEIGHTS, SCALES.to(dtype), strict=True):
        assert torch.equal(widened(weight, scale), weight * scale)


def test_memory_is_used_again_only_when_nothing_has_it() -> None:
    first = widened(WEIGHTS[0], SCALES[0])
    view = first.t()[3:]
    kept = first.clone()
    del first
    second = widened(WEIGHTS[1], SCALES[1])
    assert torch.equal(view, kept.t()[3:])
    assert storages() == 2
    del view
    third = widened(WEIGHTS[2], SCALES[2])
    assert storages() == 2
    assert torch.equal(second, WEIGHTS[1] * SCALES[1])
    assert torch.equal(third, WEIGHTS[2] * SCALES[2])


@pytest.mark.parametrize(("promising", "count"), [(True, 1), (False, 3)])
def test_saved_tensors_are_not_written_over(promising: bool, count: int) -> None:
    """In a device nothing keeps it; in anybody's own loop autograd does, and has it to itself."""
    x = torch.randn(4, 16, generator=DICE, requires_grad=True)
    if promising:
        with making_again():
            results = [F.linear(x, again(widened, *pair)) for pair in PAIRS]
    else:
        results = [F.linear(x, again(widened, *pair)) for pair in PAIRS]
    assert storages() == count
    plain = [F.linear(x, weight * scale) for weight, scale in PAIRS]
    for mine, theirs in zip(results, plain, strict=True):
        ours, want = (torch.autograd.grad(y.square().sum(), x)[0] for y in (mine, theirs))
        assert torch.equal(ours, want)
