"""What is written into a batch, keys that no plan writes, and draws from generators."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.runtime import APART
from bigbrain_fx.runtime.fixed_entries import require_fixed
from bigbrain_fx.runtime.stream import BatchError


class Kind(enum.Enum):
    ONE = 1


class Halving(nn.Module):
    """Halves its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(x)


def _loss(output: Tensor, batch: Any) -> Tensor:
    return (output - batch["y"]).pow(2).mean()


def _apart() -> dict[str, Tensor]:
    both = torch.randn(4, 8)
    return {"x": both[:, :4], "y": both[:, 4:]}


def _same() -> dict[str, Tensor]:
    x = torch.randn(4, 4)
    return {"x": x, "y": x}


def _shifted() -> dict[str, Tensor]:
    both = torch.randn(4, 5)
    return {"x": both[:, :-1], "y": both[:, 1:]}


@pytest.mark.gate("_same")
@pytest.mark.parametrize("made", [_same, _shifted])
def test_entries_of_one_memory_that_are_written_are_refused(
    made: Callable[[], dict[str, Tensor]],
) -> None:
    assert take_apart(made()).overlapping() == {"x": "y", "y": "x"}
    with pytest.raises(InputError, match="y is the same memory") as caught:
        capture(Halving(), made(), _loss)
    assert "y = x.clone()" in (caught.value.help or "")


def test_entries_beside_each_other_in_one_memory_are_two() -> None:
    assert take_apart(_apart()).overlapping() == {}
    found = capture(Halving(), _apart(), _loss)
    assert any("writes into the batch in place (x)" in said for said in found.warnings)


@pytest.mark.parametrize("key", [(1, 2), Kind.ONE, 0.5, True, None])
def test_keys_that_no_plan_writes_are_refused(key: object) -> None:
    batch = {"x": torch.randn(4, 4), "y": {key: torch.randn(4, 4)}}
    with pytest.raises(InputError, match=r"the batch has the key") as caught:
        take_apart(batch)
    assert "by a text" in (caught.value.help or "")


def test_texts_and_numbers_are_keys() -> None:
    batch = {"x": torch.randn(4, 4), 0: {"a b": torch.randn(4, 4), 7: torch.randn(4)}}
    assert [entry.key for entry in take_apart(batch).entries] == [("x",), (0, "a b"), (0, 7)]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        dice = torch.Generator().manual_seed(7)
        return (self.linear(x) + torch.randn(4, generator=dice)).mean()  # the draw


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, config: dict[str, float]) -> Tensor:
        ctx.rate = config["rate"]
        return x * ctx.rate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.rate, None


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.linear(x), {"rate": 2.0}).mean()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("model", "what", "line"),
    [(Drawing, "draws from a torch.Generator", ""), (Configured, "takes a dict", "rate")],
)
def test_what_no_graph_holds_is_refused_with_its_line(
    model: type[nn.Module], what: str, line: str
) -> None:
    with pytest.raises(BigBrainError, match=what) as caught:
        capture(model(), (torch.randn(2, 4),))
    if not line:  # torch names none
        return
    file, _, number = (caught.value.at or "").partition(":")
    assert file == "test_written_batch.py"
    with open(__file__, encoding="utf-8") as text:
        assert line in text.read().splitlines()[int(number) - 1]


def test_what_is_written_must_lie_in_memory_of_its_own() -> None:
    fixed = [(("x",), APART)]
    whole = torch.ones(4, 6)
    require_fixed(fixed, {"x": whole[:, :3], "y": whole[:, 3:]}, 2)
    for other in (whole, whole[1:2], [whole[:, 2:]]):
        with pytest.raises(BatchError, match=r"step 2.*writes into x.*y.* the same memory"):
            require_fixed(fixed, {"x": whole[:, :3], "y": other}, 2)
