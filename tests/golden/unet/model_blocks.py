"""Blocks of UNet that several devices have.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConv(nn.Module):
    """DoubleConv, such as `inlet`, first in unet.py:36."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))  # unet.py:36
        return F.relu(self.norm2(self.conv2(x)))  # unet.py:37


class Up(nn.Module):
    """Up, such as `up.0`, first in unet.py:50."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(in_channels, channels, 2, stride=2)
        self.conv = DoubleConv(in_channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.grow(x)], dim=1))  # unet.py:50
