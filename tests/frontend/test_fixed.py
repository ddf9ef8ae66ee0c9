"""What a batch has beside its tensors, and the model goes by, stays as in the example or stops."""

from __future__ import annotations

import enum
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.plain_entries import fixed_entries, require_steady


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


def test_entries_that_decide_a_branch_are_found() -> None:
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


class Phase(enum.Enum):
    """Of training."""

    WARM = 1
    MAIN = 2


@pytest.mark.parametrize(
    ("given", "other"), [(Phase.WARM, Phase.MAIN), (slice(0, 1), slice(0, 2)), (torch.float32, 3)]
)
def test_of_an_object_it_is_what_repr_says(given: object, other: object) -> None:
    def by(output: Tensor, batch: Any) -> Tensor:
        return output.mean() * (1.0 if batch["odd"] == given else 2.0)

    example = {"x": torch.ones(4, 3), "odd": given}
    found = fixed_entries(nn.Linear(3, 2), _as_input(example), by, None)
    assert found == ((("odd",), repr(given)),)
    with pytest.raises(InputError, match="changes odd"):
        require_steady(
            nn.Linear(3, 2),
            _as_input(example),
            by,
            lambda: iter([{**_as_input(example), "odd": other}]),
        )


def _as_input(example: dict[str, Any]) -> dict[str, Any]:
    return {"input": example["x"], "odd": example["odd"]}


def test_numbers_in_a_tuple_are_counted() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scales: tuple[float, ...]) -> Tensor:  # type: ignore[override]
            return super().forward(x).mean() * math.prod(scales)

    example = {"x": torch.ones(4, 3), "scales": (1.0, 2.0)}
    assert (("scales",), 2) in fixed_entries(Scaled(3, 2), example, None, None)


class Walks(nn.Module):
    """Takes the entries of a dict one after another, or by name."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.a, self.by_name = nn.Linear(2, 2), by_name

    def forward(self, t: dict[str, Tensor]) -> Tensor:
        one, two = (t["u"], t["v"]) if self.by_name else t.values()
        return (self.a(one) * 2 + self.a(two)).mean()


@pytest.mark.parametrize(("by_name", "kept"), [(False, ((("t",), "u, v"),)), (True, ())])
def test_the_order_of_a_dict_counts_where_the_model_goes_by_it(by_name: bool, kept: object) -> None:
    example = {"t": {"u": torch.ones(4, 2), "v": torch.zeros(4, 2)}}
    assert fixed_entries(Walks(by_name), example, None, None) == kept
