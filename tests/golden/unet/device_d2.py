"""Device d2: stage 2 of 3 of UNet.

    d0 --> d1 --> [d2]      gpipe, 4 micro-batches of 2

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import nn

if __package__:  # as in `from bundle.device_d2 import Stage2`
    from .runtime import Channel, Device, Stage, Tensors
else:
    from runtime import Channel, Device, Stage, Tensors


class DoubleConv(nn.Module):
    """DoubleConv, such as `inlet`, first in unet.py:36."""

    def __init__(self, in_channels, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))  # unet.py:36
        return F.relu(self.norm2(self.conv2(x)))  # unet.py:37


class Up(nn.Module):
    """Up, such as `up.0`, first in unet.py:50."""

    def __init__(self, in_channels, channels):
        super().__init__()
        self.grow = nn.ConvTranspose2d(in_channels, channels, 2, stride=2)
        self.conv = DoubleConv(in_channels, channels)

    def forward(self, x, skip):
        return self.conv(torch.cat([skip, self.grow(x)], dim=1))  # unet.py:50


class Stage2(Stage):
    """Stage 2, for device d2: up.1 to head."""

    returns = ("binary_cross_entropy_with_logits",)

    def __init__(self):
        super().__init__()
        self.up = Tensors({1: Tensors(conv=DoubleConv(32, 16)), 2: Up(16, 8)})
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x, x_2, grow, batch_1):
        x_2 = self.up[1].conv(torch.cat([x_2, grow], dim=1))  # unet.py:50
        x = self.up[2](x_2, x)  # unet.py:72
        return F.binary_cross_entropy_with_logits(self.head(x), batch_1)  # unet.py:84


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
X_FROM_0 = Channel(
    0, "activation", "relu_1", 0, 2, "d0", "d2", (2, 8, 32, 32), torch.float32, requires_grad=True
)
X_2_FROM_0 = Channel(
    1, "activation", "relu_3", 0, 2, "d0", "d2", (2, 16, 16, 16), torch.float32, requires_grad=True
)
GROW_FROM_1 = Channel(
    3,
    "activation",
    "conv_transpose2d_1",
    1,
    2,
    "d1",
    "d2",
    (2, 16, 16, 16),
    torch.float32,
    requires_grad=True,
)
X_GRAD_TO_0 = Channel(4, "gradient", "relu_1", 2, 0, "d2", "d0", (2, 8, 32, 32), torch.float32)
X_2_GRAD_TO_0 = Channel(5, "gradient", "relu_3", 2, 0, "d2", "d0", (2, 16, 16, 16), torch.float32)
GROW_GRAD_TO_1 = Channel(
    7, "gradient", "conv_transpose2d_1", 2, 1, "d2", "d1", (2, 16, 16, 16), torch.float32
)


class DeviceD2(Device):
    """What d2 does in one step; `step_once` at the end is the schedule."""

    name = "d2"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {2: Stage2}
    loss = (2, "binary_cross_entropy_with_logits")
    channels = (X_FROM_0, X_2_FROM_0, GROW_FROM_1, X_GRAD_TO_0, X_2_GRAD_TO_0, GROW_GRAD_TO_1)

    def forward_2(self, m):
        x = self.recv(X_FROM_0, m)  # from d0
        x_2 = self.recv(X_2_FROM_0, m)  # from d0
        grow = self.recv(GROW_FROM_1, m)  # from d1
        batch_1 = self.batch("batch_1", m)
        self.forward(2, m, x=x, x_2=x_2, grow=grow, batch_1=batch_1)

    def backward_2(self, m):
        x_grad, x_2_grad, grow_grad = self.backward(2, m)
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0
        self.send(X_2_GRAD_TO_0, m, x_2_grad)  # to d0
        self.send(GROW_GRAD_TO_1, m, grow_grad)  # to d1

    def update(self):
        self.optimizer_step()

    def step_once(self):
        for m in range(4):
            self.forward_2(m)
        for m in range(4):
            self.backward_2(m)
        self.update()
