"""Convolutions: skips, strides, growing widths, transposed ones."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.conformance.zoo.case import Batch, Case
from tools.conformance.zoo.plain.shared import (
    ROWS,
    WIDTH,
    classes_loss,
    mse,
    pictures,
)


class UNet(nn.Module):
    """Skips go over the bottom: they cross every cut."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = [8] * (depth + 1)
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())
            for a, b in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(depth))
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for level, layer in enumerate(self.down):
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2) if level % 2 == 0 else x
        for layer in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = F.relu(layer(torch.cat([x, skip], dim=1)))
        return self.head(x)


def _noisy() -> Batch:
    return {"x": torch.randn(ROWS, 1, 16, 16), "y": torch.randn(ROWS, 1, 16, 16)}


class ConvBlock(nn.Module):
    """A mobile block as in timm: depthwise convolution, squeeze and excitation, drop path."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.squeeze = nn.Conv2d(width, width // 4, 1)
        self.excite = nn.Conv2d(width // 4, width, 1)
        self.point = nn.Conv2d(width, width, 1)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.conv(x)))
        scale = F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = self.point(y * torch.sigmoid(self.excite(scale)))
        if self.training and self.drop:
            kept = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.drop)
            y = y * kept.div_(1 - self.drop)
        return x + y


class ConvNet(nn.Module):
    """A small image classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(ConvBlock(16, 0.1) for _ in range(depth)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class DenseNet(nn.Module):
    """Every layer reads all layers before it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)
            )
            for i in range(depth)
        )
        self.head = nn.Linear(8 + 4 * depth, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Generator(nn.Module):
    """Transposed convolutions and instance norms, from a code to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, 16 * 4)
        self.up = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.last = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.up(self.start(x).view(-1, 16, 2, 2))), 0.2)
        return torch.tanh(self.last(y)).flatten(1)


CASES = (
    Case("unet-skips", UNet, _noisy, mse),
    Case("conv-net", ConvNet, pictures(), classes_loss),
    Case("dense-net", DenseNet, pictures(), classes_loss),
    Case(
        "generator",
        lambda _: Generator(),
        lambda: {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, 16)},
        mse,
        depth=0,
    ),
)
