"""What a batch has beside its tensors, and the model goes by, stays as in the example or stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.fixed import fixed_entries
from bigbrain_fx.frontend.tracing.values import require_steady


class Net(nn.Module):
    """Goes by phase, mask, epoch, flag and the number of views; not by a name."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 2)

    def forward(
        self, views: list[Tensor], phase: str, mask: Tensor | None, epoch: int, flag: bool
    ) -> Tensor:
        found = torch.stack([self.lift(view) for view in views]).sum(0)
        found = found if mask is None else found * mask
        scale = (0.5 if phase == "warm" else 1.0) * (2.0 if epoch >= 100 else 1.0)
        return found.square().mean() * (scale if flag else -scale)


def batch(**more: object) -> dict[str, Any]:
    made = {"views": [torch.ones(4, 3), torch.ones(4, 3)], "phase": "warm", "mask": None}
    return {**made, "epoch": 0, "flag": True, **more}


def energy(output: Tensor, given: Any) -> Tensor:
    assert f"{given['name']}".isascii()  # shown to someone
    return output


def test_what_the_model_goes_by_is_found() -> None:
    found = fixed_entries(Net(), batch(name="a.png", step=3), energy, None)
    wanted = {"views": 2, "phase": "warm", "mask": None, "epoch": 0, "flag": True}
    assert dict(found) == {(key,): value for key, value in wanted.items()}


class Pair(nn.Module):
    """Unpacks a pair: three would fail in plain PyTorch, too."""

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        one, other = pair
        return (x * one * other).mean()


def test_of_tensors_in_their_places_nothing_is_fixed() -> None:
    example = {"x": torch.ones(4), "pair": (torch.ones(4), torch.ones(4))}
    assert not fixed_entries(Pair(), example, None, None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mask": torch.zeros(4, 2)}, r"changes mask from None to a tensor of shape \[4, 2\]"),
        ({"views": [torch.ones(4, 3)] * 3}, "changes views from 2 entries to 3 entries"),
        ({"phase": "main"}, "changes phase from 'warm' to 'main'"),
    ],
)
def test_early_batches_that_have_it_otherwise_are_refused(more: Any, said: str) -> None:
    def given() -> Iterator[object]:
        return iter([batch(), batch(**more)])

    with pytest.raises(InputError, match=said):
        require_steady(Net(), batch(), lambda out, _: out, given)
