"""Single ops of image models in shapes of no model here, each fed by an op of its own.

    bigbrain-fx profile tools/image_ops.py --rows 1,2,4,8,16,32,64 --device cpu --db ops.sqlite

What convolutions, pools and norms of `estimators/op_rules.py` were fitted to, beside ops of models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (  # channels in and out, side, kernel, stride, groups
    *((3, 16, 32, 3, 1, 1), (3, 32, 64, 7, 2, 1), (3, 96, 64, 4, 4, 1), (1, 24, 28, 5, 1, 1)),
    *((8, 8, 32, 3, 1, 1), (12, 24, 24, 3, 1, 1), (24, 24, 28, 3, 1, 1), (24, 48, 28, 3, 2, 1)),
    *((48, 48, 14, 3, 1, 1), (48, 96, 14, 3, 2, 1), (96, 96, 7, 3, 1, 1), (80, 80, 20, 3, 1, 1)),
    *((160, 160, 10, 3, 1, 1), (256, 256, 6, 3, 1, 1), (192, 192, 3, 3, 1, 1)),
    *((24, 96, 28, 1, 1, 1), (96, 24, 14, 1, 1, 1), (192, 48, 7, 1, 1, 1), (256, 64, 14, 1, 1, 1)),
    *((48, 96, 28, 1, 2, 1), (24, 24, 20, 5, 1, 1), (40, 40, 16, 7, 1, 1)),
    *((48, 48, 28, 3, 1, 48), (96, 96, 14, 3, 2, 96), (64, 64, 20, 3, 1, 8)),
)
POOLS = ((24, 28, 2, 2), (96, 14, 2, 2), (48, 32, 3, 2), (16, 48, 2, 2))  # channels, side, ...
NORMS = ((16, 32), (24, 28), (48, 14), (96, 7), (160, 10), (32, 56))
TRANSPOSED = ((48, 14), (96, 7), (32, 28))
LINEARS = ((512, 512), (96, 10), (768, 3072), (64, 256))


class Fed(nn.Module):
    """An op after a product of its own, so that its input wants a gradient."""

    def __init__(self, op: nn.Module, *shape: int) -> None:
        super().__init__()
        self.op, self.scale = op, nn.Parameter(torch.ones(1, *shape))

    def forward(self, rows: Tensor) -> Tensor:
        """Return one number a row."""
        ones = [1] * (self.scale.dim() - 1)
        y = self.op(rows.reshape(-1, *ones).expand(-1, *self.scale.shape[1:]) * self.scale)
        found: Tensor = y.flatten(1).mean(1)
        return found + F.adaptive_avg_pool2d(y, 1).flatten(1).mean(1) if len(ones) == 3 else found


def _ops() -> Iterator[Fed]:
    for number, (a, b, side, kernel, stride, groups) in enumerate(CONVOLUTIONS):
        pad = kernel // 2 if stride < kernel else 0
        bias = number % 2 == 0
        made = nn.Conv2d(a, b, kernel, stride, pad, groups=groups, bias=bias)
        yield Fed(made, a, side, side)
    for channels, side, kernel, stride in POOLS:
        yield Fed(
            nn.MaxPool2d(kernel, stride, kernel // 2 if kernel == 3 else 0), channels, side, side
        )
        yield Fed(nn.AvgPool2d(2), channels, side, side)
    for channels, side in NORMS:
        for op in (nn.BatchNorm2d(channels), nn.ReLU(), nn.GroupNorm(8, channels)):
            yield Fed(op, channels, side, side)
    for channels, side in TRANSPOSED:
        yield Fed(nn.ConvTranspose2d(channels, channels // 2, 2, 2), channels, side, side)
    for a, b in LINEARS:
        yield Fed(nn.Linear(a, b), a)


class ImageOps(nn.Module):
    """All of them, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = nn.ModuleList(_ops())

    def forward(self, rows: Tensor) -> Tensor:
        """Return one number a row."""
        found = rows.sum(1)
        for op in self.ops:
            found = found + op(rows)
        return found


def model() -> nn.Module:
    """Build it."""
    return ImageOps()


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    """Return the mean."""
    return output.mean()


def example_batch() -> tuple[Tensor]:
    """Return a column of numbers."""
    return (torch.randn(8, 1),)
