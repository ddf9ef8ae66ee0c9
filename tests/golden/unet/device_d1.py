"""Device d1: stage 1 of 3 of UNet.

    d0 --> [d1] --> d2      gpipe, 4 micro-batches of 2

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .model_blocks import DoubleConv, Up
    from .runtime import Channel, Device, Stage, Tensors
else:
    from model_blocks import DoubleConv, Up
    from runtime import Channel, Device, Stage, Tensors


class Stage1(Stage):
    """Stage 1, for device d1: down.1 to up.1."""

    returns = ("grow",)

    def __init__(self) -> None:
        super().__init__()
        self.down = Tensors({1: Tensors(norm2=nn.GroupNorm(4, 32)), 2: DoubleConv(32, 64)})
        self.up = nn.ModuleList([Up(64, 32), Tensors(grow=nn.ConvTranspose2d(32, 16, 2, stride=2))])

    def forward(self, conv2: Tensor) -> Tensor:
        relu = F.relu(self.down[1].norm2(conv2))  # unet.py:37
        x = self.down[2](F.max_pool2d(relu, 2))  # unet.py:70
        x = self.up[0](x, relu)  # unet.py:72
        return self.up[1].grow(x)  # unet.py:50


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
CONV2_FROM_0 = Channel(
    2, "activation", "conv2d_5", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 32, 8, 8), dtype=torch.float32, requires_grad=True,
)
GROW_TO_2 = Channel(
    3, "activation", "conv_transpose2d_1", source=1, target=2, sender="d1", receiver="d2",
    shape=(2, 16, 16, 16), dtype=torch.float32, requires_grad=True,
)
CONV2_GRAD_TO_0 = Channel(
    6, "gradient", "conv2d_5", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 32, 8, 8), dtype=torch.float32,
)
GROW_GRAD_FROM_2 = Channel(
    7, "gradient", "conv_transpose2d_1", source=2, target=1, sender="d2", receiver="d1",
    shape=(2, 16, 16, 16), dtype=torch.float32,
)


class DeviceD1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {1: Stage1}
    channels = (CONV2_FROM_0, GROW_TO_2, CONV2_GRAD_TO_0, GROW_GRAD_FROM_2)

    def forward_1(self, m: int) -> None:
        conv2 = self.recv(CONV2_FROM_0, m)  # from d0
        grow = self.forward(1, m, conv2=conv2)
        self.send(GROW_TO_2, m, grow)  # to d2

    def backward_1(self, m: int) -> None:
        grow_grad = self.recv(GROW_GRAD_FROM_2, m)  # from d2
        conv2_grad = self.backward(1, m, grow=grow_grad)
        self.send(CONV2_GRAD_TO_0, m, conv2_grad)  # to d0

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(4):
            self.forward_1(m)
        for m in range(4):
            self.backward_1(m)
        self.update()
