"""What a batch has beside its tensors, and the model goes by, stays as in the example or stops."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.batches.constants import require_steady
from bigbrain_fx.frontend.tracing.batches.fixed_entries import fixed_entries


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


def test_an_object_that_repr_does_not_tell_is_refused_where_it_is_read() -> None:
    class Note:
        scale = 2.0

    example = {"input": torch.ones(4, 3), "note": Note(), "table": np.ones(2)}
    assert not fixed_entries(nn.Linear(3, 2), example, lambda out, _: out.mean(), None)
    for name in ("note", "table"):

        def by(output: Tensor, batch: Any, name: str = name) -> Tensor:
            held = batch[name]
            return output.mean() * (held.scale if name == "note" else float(held.sum()))

        with pytest.raises(InputError, match=f"goes by {name} of the batch, an object") as caught:
            fixed_entries(nn.Linear(3, 2), example, by, None)
        assert "torch.from_numpy" in (caught.value.help or "")


def test_numbers_in_a_tuple_are_counted() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scales: tuple[float, ...]) -> Tensor:  # type: ignore[override]
            return super().forward(x).mean() * math.prod(scales)

    example = {"x": torch.ones(4, 3), "scales": (1.0, 2.0)}
    assert (("scales",), 2) in fixed_entries(Scaled(3, 2), example, None, None)


def test_an_entry_that_an_early_batch_has_more_is_refused_where_it_counts() -> None:
    def weighed(output: Tensor, batch: Any) -> Tensor:
        return (output * batch.get("weight", 1.0)).mean()

    example = {"input": torch.ones(4, 3)}
    more = {**example, "weight": torch.full((4, 1), 2.0)}
    with pytest.raises(InputError, match="changes weight from nothing"):
        require_steady(nn.Linear(3, 2), example, weighed, lambda: iter([example, more]))
    require_steady(nn.Linear(3, 2), example, lambda o, _: o.mean(), lambda: iter([example, more]))


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
