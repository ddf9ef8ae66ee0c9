"""Batches of unequal rows and lengths: what a model file says of them is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.frontend.tracing.batches.uneven import pads, require_padding, require_rows
from bigbrain_fx.frontend.translation.batch import fill, take_apart

ROWS = 6


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def captured(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = mean, **options: Any
) -> Captured:
    torch.manual_seed(0)
    return capture(model, {"x": x, "y": y}, loss, **options)


def by_len(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().sum() / len(batch["y"])


def by_shape(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().sum() / batch["y"].shape[0]


def test_rows_counted_by_len_are_a_number_and_by_shape_are_not() -> None:
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 2)
    found = captured(Plain(), x, y, by_len)
    assert any("or len(x)" in said for said in found.warnings)
    with pytest.raises(InputError, match=r"drop_last = False, and the trace holds") as error:
        require_rows(False, found, True)
    assert "x.shape[0], not a number nor len(x)" in (error.value.help or "")
    require_rows(False, captured(Plain(), x, y, by_shape), True)


def test_an_entry_may_be_whole_whatever_its_length() -> None:
    batch = {"x": torch.zeros(ROWS, 4), "table": torch.zeros(ROWS, 2)}
    found = take_apart(batch, dims={"table": None})
    assert [entry.batched for entry in found.entries] == [True, False]
    assert found.sized(3)["table"].shape == (ROWS, 2)


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        ({"z": 0}, "batch_dims names 'z', and example_batch() has no such tensor"),
        ({"x": 2}, "batch_dims says dimension 2 of 'x', which has the shape"),
        ({"x": 1, "y": 0}, "batch_dims gives the example batch 4, 6 rows"),
    ],
)
def test_batch_dims_that_do_not_fit_are_refused(
    dims: dict[str | int, int | None], match: str
) -> None:
    with pytest.raises(InputError) as error:
        take_apart({"x": torch.zeros(ROWS, 4), "y": torch.zeros(ROWS)}, dims=dims)
    assert match in str(error.value)
    assert error.value.help


class Pooled(nn.Module):
    """A mean over positions; where there is a mask, over those that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(5, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found = self.a(x)
        return found.mean(1) if mask is None else (found * mask[..., None]).sum(1)


def test_padding_must_not_count() -> None:
    x, y, mask = torch.randint(1, 5, (ROWS, 8)), torch.randn(ROWS, 2), torch.ones(ROWS, 8)
    model = Pooled()
    found = capture(model, {"x": x, "y": y}, mean)
    with pytest.raises(InputError, match=r"pad fills up what counts") as error:
        require_padding(model, mean, {"x": 0}, found, None)
    assert "mask" in (error.value.help or "")
    found = capture(model, {"x": x, "mask": mask, "y": y}, mean)
    pad: dict[str | int, int | float] = {"x": 0, "mask": 0}
    assert require_padding(model, mean, pad, found, None) == ""
    assert pads(found.batch, pad) == pad


def test_tensors_of_other_layouts_are_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)
    for entry, kind in ((torch.eye(4).to_sparse(), "sparse_coo"), (nested, "nested")):
        with pytest.raises(InputError, match=f"batch entry 'x' is a {kind} tensor") as caught:
            take_apart({"x": entry, "y": torch.zeros(ROWS)})
        assert "in forward" in (caught.value.help or "")


class ByLengths(Pooled):
    """A mean over as many positions as a row has; one that forgets to look at them."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        there = torch.arange(x.shape[1])[None] < lengths[:, None]
        found = self.a(x) if self.forgets else self.a(x) * there[..., None]
        return found.sum(1) / lengths[:, None]


def test_a_mask_that_is_made_of_lengths_is_one() -> None:
    """The example's lengths are those of whole rows; the trial cuts them with the rows."""
    x, y = torch.randint(1, 5, (ROWS, 8)), torch.randn(ROWS, 2)
    batch = {"x": x, "lengths": torch.tensor([8, 3, *([7] * (ROWS - 2))]), "y": y}
    pad: dict[str | int, int | float] = {"x": 0}
    for model in (ByLengths(), ByLengths(forgets=True)):
        found = capture(model, batch, mean)
        if model.forgets:
            with pytest.raises(InputError, match="pad fills up what counts"):
                require_padding(model, mean, pad, found, None)
        else:
            assert require_padding(model, mean, pad, found, None) == ""


def test_rows_in_another_dimension_come_back_where_the_user_has_them() -> None:
    x = torch.randn(4, ROWS, 4)
    found = take_apart({"x": x, "y": torch.zeros(ROWS)}, dims={"x": 1})
    assert (found.entries[0].dim, found.entries[0].tensor.shape[0], found.rows) == (1, ROWS, ROWS)
    again = fill(found.template, found.sized(ROWS))
    assert isinstance(again, dict)
    assert torch.equal(again["x"], x)
