"""A U-Net (Ronneberger et al., 2015): find the discs in a noisy image.

What the way down has seen at each resolution, the way up reads again: wherever the network is cut
in two, one of these skips crosses the cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTH = 3  # times that the image is halved
WIDTH = 8  # channels at full resolution; they double with every halving
SIZE = 32  # pixels per side, a multiple of 2 ** DEPTH
BATCH = 8  # images per mini-batch
DISCS = 3  # per image
NOISE = 0.3  # standard deviation, against a contrast of one


class DoubleConv(nn.Module):
    """Two convolutions, each with a norm and a ReLU."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, side, side) to (batch, channels, side, side)."""
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Double the image's sides and read it together with what was seen on the way down."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.conv = DoubleConv(2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map (batch, 2 × channels, side / 2, side / 2) to the shape of skip."""
        return self.conv(torch.cat((skip, self.grow(x)), dim=1))


class UNet(nn.Module):
    """Say for each pixel whether it lies in a disc."""

    def __init__(self, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        self.inlet = DoubleConv(1, width)
        self.down = nn.ModuleList(DoubleConv(c, 2 * c) for c in channels[:-1])
        self.up = nn.ModuleList(Up(c) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (batch, 1, side, side) for images of that shape."""
        x = self.inlet(image)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def model() -> nn.Module:
    """Build the default U-Net."""
    return UNet()


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean binary cross-entropy of the pixels, in nats."""
    _, mask = batch
    return F.binary_cross_entropy_with_logits(output, mask)


def example_batch() -> tuple[Tensor, Tensor]:
    """Return one mini-batch: images and the masks of their discs."""
    return next(batches(seed=0))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield noisy discs and their masks; the t-th batch depends on seed and t alone."""
    pixel = torch.arange(SIZE).float()
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        centre = SIZE * torch.rand(BATCH, DISCS, 2, 1, 1, generator=dice)
        radius = 3 + 4 * torch.rand(BATCH, DISCS, 1, 1, generator=dice)
        y, x = pixel[:, None] - centre[:, :, 0], pixel[None, :] - centre[:, :, 1]
        inside = x.square() + y.square() < radius.square()
        mask = inside.any(dim=1, keepdim=True).float()
        yield mask + NOISE * torch.randn(mask.shape, generator=dice), mask
