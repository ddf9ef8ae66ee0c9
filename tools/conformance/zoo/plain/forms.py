"""Forms of what goes in and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.conformance.zoo.case import Batch, Case
from tools.conformance.zoo.plain.autograd import Inner
from tools.conformance.zoo.plain.shared import (
    ROWS,
    WIDTH,
    Stack,
    mse,
    vectors,
)


@dataclass
class Result:
    """Output of a model."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    nothing: None = None


class DataclassOut(nn.Module):
    """Returns a dataclass of the user's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(self, x: Tensor, y: Tensor) -> Result:
        logits = self.body(x)
        return Result(F.mse_loss(logits, y), logits, (x * 2,))


class DictOut(nn.Module):
    """Returns a nest of dicts and lists."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        logits = self.body(x)
        return {"loss": F.mse_loss(logits, y), "parts": [logits, {"again": logits}], "none": None}


class KeywordOnly(nn.Module):
    """Takes keyword-only, optional and constant inputs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(
        self, x: Tensor, *, mask: Tensor | None, scale: float = 1.0, bias: Tensor | None = None
    ) -> Tensor:
        x = x if mask is None else x * mask
        return self.body(x * scale if bias is None else x * scale + bias)


def _keywords() -> Batch:
    return {**vectors(), "mask": None, "scale": 0.5}  # type: ignore[dict-item]  # a dict


class TupleIn(nn.Module):
    """Takes a nest of tensors."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(self, pair: tuple[Tensor, Tensor], sizes: list[int]) -> Tensor:
        return self.body(pair[0] * sizes[0] + pair[1])


CASES = (
    Case("dict-output", DictOut, vectors),
    Case("dataclass-output", DataclassOut, vectors),
    Case("keyword-only", KeywordOnly, _keywords, mse),
    Case(
        "nested-input",
        TupleIn,
        lambda: {
            "pair": (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)),
            "sizes": [2, 3],
            "y": torch.randn(ROWS, WIDTH),
        },
        mse,
    ),
)
