"""A number that is compared and may raise is kept as a question; of others nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.translation.oracle import WrongAnswerError, only_compares
from tests.support.captured import assert_same, run

COMPARED = (
    "assert x.max().item() <= n",
    "assert 0 <= x.min().item() < n and not x.max().item() > 2 * n, 'far'",
    "assert x.max().item() + 1 <= n",
    "if x.max().item() > n: raise ValueError",
    "if a.item() != b.item():\n    raise ValueError",
    "assert (\n    x.max().item()\n    <= n\n)",
)
MORE = (
    "assert (top := x.max().item()) <= n",
    "assert int(x.max().item()) <= n",
    "assert fits(x.max().item())",
    "assert x.max().item() in sizes",
    "assert x.max().item()",
    "assert x[i.item()] <= n",
    "assert x.max().item() <= n and flags[i.item()]",
    "if x.max().item() > n:\n    x = x / 2",
    "if x.max().item() > n: raise ValueError\nelse: n = x.max().item()",
    "top = x.max().item()",
)


def _is_said(folder: Path, text: str) -> bool:
    file = folder / "lines.py"
    file.write_text(text)
    asks = next(i for i, line in enumerate(text.split("\n"), 1) if ".item()" in line)
    return only_compares(str(file), asks)


@pytest.mark.parametrize("text", COMPARED)
def test_numbers_that_are_compared(tmp_path: Path, text: str) -> None:
    assert _is_said(tmp_path, text)


@pytest.mark.parametrize("text", MORE)
def test_numbers_with_other_uses(tmp_path: Path, text: str) -> None:
    assert not _is_said(tmp_path, text)


class Checked(nn.Module):
    """Looks at lengths as XLM does, and at a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.linear(x)
        assert lengths.max().item() <= h.shape[1]
        if h.abs().max().item() > 100.1:
            raise ValueError("too large")
        return (h * (torch.arange(4) < lengths[:, None])).square().mean()


def test_a_number_that_is_checked_is_a_question() -> None:
    model = Checked()
    found = capture(model, (torch.randn(4, 4), torch.tensor([1, 2, 3, 4])))
    assert found.graph.static_batch is None
    assert_same(model, found, model)
    asked = [op.target for op in found.graph.ops if op.target.startswith("assume.")]
    assert asked == ["assume.true", "assume.false"]


def test_a_check_that_fails_later_is_reported() -> None:
    model = Checked()
    found = capture(model, (torch.randn(4, 4), torch.tensor([1, 2, 3, 4])))
    with pytest.raises(WrongAnswerError, match="assumed to be True, and is False here: assert"):
        run(found, {"x": torch.randn(4, 4), "lengths": torch.tensor([1, 2, 3, 5])})
