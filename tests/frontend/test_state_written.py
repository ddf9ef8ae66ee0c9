"""Weights and buffers that forward writes, and what it keeps of the first weights."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from tests.support.captured import assert_same


class Turning(nn.Module):
    """Turns a buffer round in place, or what `.contiguous()` gives: the buffer itself."""

    m: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lift, self.how = nn.Linear(6, 6), how
        self.register_buffer("m", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "itself":
            self.m.t_()
        if self.how == "contiguous":
            self.m.contiguous().t_()
        if self.how == "written":
            self.m.copy_(self.m.t().clone())
        return (self.lift(x) @ self.m.t()).square().mean()


@pytest.mark.parametrize("how", ["itself", "contiguous"])
def test_a_buffer_that_is_turned_round_in_place_is_refused(how: str) -> None:
    with pytest.raises(CaptureError, match="turns the buffer m of Turning round") as caught:
        capture(Turning(how), {"x": torch.randn(4, 6)})
    assert "self.m.t()" in (caught.value.help or "")


@pytest.mark.parametrize("how", ["view", "written"])
def test_the_remedies_for_it_work(how: str) -> None:
    model = Turning(how)
    assert_same(model, capture(model, {"x": torch.randn(4, 6)}), model)


@functools.lru_cache
def _mask(n: int) -> Tensor:
    return torch.full((n, n), float("-inf")).triu(1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h @ h.transpose(1, 2) + _mask(x.shape[1])).softmax(-1).square().mean()


def test_a_cached_function_gives_runs_nothing_of_a_trace() -> None:
    model = Masked()
    found = capture(model, (torch.randn(4, 5, 6),))
    assert_same(model, found, model)
    assert _mask.cache_info().misses >= 1
    assert type(_mask(5)) is Tensor


class PackedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cells(x)[0]
        return found


class WithPackedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = PackedPart()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).sum()


def test_a_recurrent_layers_own_list_of_its_weights_is_no_cache() -> None:
    found = capture(WithPackedPart(), (torch.randn(2, 4, 3),), leaves=("PackedPart",))
    assert [op.target for op in found.graph.ops if op.target.startswith("leaf.")] == ["leaf.part"]


class Hooked(nn.Module):
    """Sets a hook at its first call, and notes so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.hooked = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.a.register_forward_hook(lambda part, given, made: made * 2)
            self.hooked = True
        return self.a(x)


def test_a_hook_goes_with_the_flag_that_says_it_is_set() -> None:
    """A flag put back without its hook had the next call set another one."""
    model, x = Hooked(), torch.ones(3, 2)
    before = Attributes.of(model)
    first = model(x)
    for _ in range(2):
        before.put_back()
        assert not model.a._forward_hooks
        assert model(x).equal(first)
    assert "a._forward_hooks" in before.moved(Attributes.of(model))
