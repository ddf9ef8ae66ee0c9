"""A ResNet for 32 × 32 images in the manner of its CIFAR experiments (He et al., 2015).

BatchNorm is in training mode: each micro-batch is normalised by its own statistics and writes the
running ones, so a splitter has to keep a layer's buffers with the layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 2  # per resolution; the paper's n, its networks have 6n + 2 layers
WIDTH = 8  # channels at full resolution; the paper has 16
CLASSES = 10
SIZE = 32  # pixels per side
BATCH = 16  # images per mini-batch
NOISE = 1.0  # standard deviation, against a pattern of about one


class Block(nn.Module):
    """Two convolutions and a shortcut past them; with stride 2 the image halves."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, side, side) to (batch, channels, side / stride, ...)."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """Name the class of an image."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.layer1 = _layer(width, width, blocks, stride=1)
        self.layer2 = _layer(width, 2 * width, blocks, stride=2)
        self.layer3 = _layer(2 * width, 4 * width, blocks, stride=2)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) for images (batch, 3, side, side)."""
        x = F.relu(self.norm(self.conv(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _layer(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(channels_in, channels, stride)
    return nn.Sequential(first, *(Block(channels, channels, 1) for _ in range(blocks - 1)))


def model() -> nn.Module:
    """Build the default ResNet."""
    return ResNet()


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the class, in nats."""
    _, labels = batch
    return F.cross_entropy(output, labels)


def example_batch() -> tuple[Tensor, Tensor]:
    """Return one mini-batch: images and their classes."""
    return next(batches(seed=0))


def patterns() -> Tensor:
    """Return one coarse coloured pattern per class, (classes, 3, side, side); always the same."""
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return F.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear")


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield noisy patterns and their classes; the t-th batch depends on seed and t alone."""
    clean = patterns()
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        labels = torch.randint(CLASSES, (BATCH,), generator=dice)
        noise = NOISE * torch.randn(BATCH, 3, SIZE, SIZE, generator=dice)
        yield clean[labels] + noise, labels


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use stochastic gradient descent with momentum, as the paper does."""
    return torch.optim.SGD(named_params, lr=0.1, momentum=0.9, weight_decay=1e-4)
