"""An entry of the batch that has no rows: a message names it, and not another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same

CLASSES = 8


class Prototypes(nn.Module):
    """Compares each row with every class; there happen to be as many classes as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.up(x) @ classes.T, labels)


class Paired(nn.Module):
    """Takes all eight rows or none: no entry alone is the cause."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.up(x).view(8, 4) - labels.view(8, 1)).square().mean()


def batch() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x, classes = (torch.randn(CLASSES, 4, generator=dice) for _ in range(2))
    return {"x": x, "classes": classes, "labels": torch.arange(CLASSES)}


def said(model: nn.Module, example: dict[str, Tensor], rows: int | None = None) -> str:
    """Return all that a capture says: its warnings, or its error with notes and help."""
    try:
        return " ".join(capture(model, example, micro_batch=rows).warnings)
    except InputError as error:
        return " ".join((error.what, *error.notes, error.help or ""))


@pytest.mark.parametrize("rows", [None, 4])
def test_the_entry_that_helps_when_it_is_whole_is_named(rows: int | None) -> None:
    text = said(Prototypes(), batch(), rows)
    assert "batch_dims = {'classes': None}" in text
    assert "{'labels': None}" not in text


def test_the_line_that_is_named_works() -> None:
    model = Prototypes()
    found = capture(model, batch(), batch_dims={"classes": None})
    assert found.graph.static_batch is None
    assert_same(model, found, model)


def test_no_entry_is_named_where_none_helps() -> None:
    example = {name: tensor for name, tensor in batch().items() if name != "classes"}
    text = said(Paired(), example, 4)
    assert "is taken for the batch" in text
    assert "batch_dims" not in text
