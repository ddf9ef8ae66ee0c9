"""The loss scale does what torch.amp.GradScaler does, number for number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from bigbrain_fx.runtime.loss_scale import LossScale, are_finite, unscaled
from bigbrain_fx.runtime.planned_sums import share_of

OPTIONS = st.fixed_dictionaries(
    {
        "init_scale": st.floats(1e-3, 1e30),
        "growth_factor": st.floats(1.01, 1e9),
        "backoff_factor": st.floats(0.01, 0.99),
        "growth_interval": st.integers(1, 4),
    }
)


@settings(deadline=None)  # torch imports more with its first scaler
@given(OPTIONS, st.lists(st.booleans(), max_size=12))
def test_the_loss_scale_changes_as_torchs(options: dict[str, float], fine: list[bool]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torchs = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    ours = LossScale(**options)  # type: ignore[arg-type]
    for all_fine in fine:
        torchs.scale(torch.zeros(()))
        assert ours.scale == torchs.get_scale()
        scaled = torch.tensor([1.0, -0.3, 7e-5]) * (1.0 if all_fine else math.inf)
        weight.grad = scaled.clone()
        torchs.unscale_(optimizer)
        if all_fine:
            assert torch.equal(unscaled({"w": scaled}, ours.scale)["w"], weight.grad)
        assert are_finite([scaled]) == all_fine
        torchs.step(optimizer)
        torchs.update()
        ours.update(all_fine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [65536.0, 2.0**24, 1000.0])
def test_the_loss_starts_with_what_autograd_would_give_it(dtype: torch.dtype, scale: float) -> None:
    for count in (1, 2, 3, 7):
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        torchs = torch.amp.GradScaler("cpu", init_scale=scale)
        torchs.scale(loss / count).backward()
        assert loss.grad is not None
        seed = torch.full_like(loss.detach(), LossScale(scale).scale)
        assert torch.equal(share_of(seed, (1,) * count, 0), loss.grad)


def test_the_loss_scale_resumes_from_a_checkpoint() -> None:
    one = LossScale(8.0, growth_interval=3)
    for fine in (True, True, False, True, True):
        one.update(fine)
    other = LossScale(8.0, growth_interval=3)
    other.restore(one.facts())
    one.update(True)
    other.update(True)
    assert one.facts() == other.facts() == [8.0, 0]
    other.restore(None)
    assert other.facts() == [8.0, 0]
