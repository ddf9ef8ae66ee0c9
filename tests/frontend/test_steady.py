"""The first calls of forward give the same numbers, wherever a counter may be kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from tests.support.messages import refused


class Progress:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def slots() -> Callable[[], int]:
    at = Progress()

    def count() -> int:
        at.calls += 1
        return at.calls

    return count


def attribute() -> Callable[[], int]:
    def count() -> int:
        count.calls += 1  # type: ignore[attr-defined]
        return int(count.calls)  # type: ignore[attr-defined]

    count.calls = 0  # type: ignore[attr-defined]
    return count


class Warm(nn.Module):
    """Warms something up in three calls: by the time of a trace it is a constant."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda _m, _i, out: out * min(1.0, count() / 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


@pytest.mark.parametrize("where", [slots, attribute])
def test_a_counter_that_has_come_to_its_end_is_refused(
    where: Callable[[], Callable[[], int]],
) -> None:
    with pytest.raises(CaptureError, match="call 2 of forward gives other numbers") as caught:
        capture(Warm(where()), (torch.randn(2, 4),))
    assert (caught.value.at or "").startswith("test_steady.py:")
    assert "register_buffer" in (caught.value.help or "")


class Steady(nn.Module):
    """Draws, writes a buffer and keeps a cache: all of it is put back, or drawn by the seed."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4.0)
        noisy = self.linear(x) + torch.randn_like(x) + self.table
        return (noisy * torch.clamp(self.calls / 3, max=1.0)).sum()


@pytest.mark.nightly
def test_what_is_put_back_counts_no_calls() -> None:
    model = Steady()
    capture(model, (torch.randn(2, 4),))
    assert float(model.calls) == 0


class Annealed(nn.Module):
    """Only running statistics go by how often it was called."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.norm, self.calls, self.count = nn.BatchNorm1d(2), 0, count

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        calls = self.calls if self.count is None else self.count()
        self.norm.momentum = 0.5 / calls
        return self.norm(x).square().mean()


@pytest.mark.parametrize(("count", "code"), [(None, "BX0160e"), (slots(), "BX0160g")])
def test_a_count_that_only_buffers_go_by_is_refused(
    count: Callable[[], int] | None, code: str
) -> None:
    with refused(code, CaptureError, vary=(r"call \d+",)):
        capture(Annealed(count), (torch.randn(4, 2),))
