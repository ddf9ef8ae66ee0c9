"""Device d2: stage 2 of 3 of UNet.

    d0 --> d1 --> [d2]      gpipe, 4 micro-batches of 2

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d2 import Stage2`
    from .model_blocks import DoubleConv, Up
    from .runtime import Channel, Device, Stage, Tensors
else:
    from model_blocks import DoubleConv, Up
    from runtime import Channel, Device, Stage, Tensors


class Stage2(Stage):
    """Stage 2, for device d2: up.1 to head."""

    returns = ("binary_cross_entropy_with_logits",)

    def __init__(self) -> None:
        super().__init__()
        self.up = Tensors({1: Tensors(conv=DoubleConv(32, 16)), 2: Up(16, 8)})
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, x_2: Tensor, grow: Tensor, batch_1: Tensor) -> Tensor:
        x_2 = self.up[1].conv(torch.cat([x_2, grow], dim=1))  # unet.py:50
        x = self.up[2](x_2, x)  # unet.py:72
        return F.binary_cross_entropy_with_logits(self.head(x), batch_1)  # unet.py:84


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_FROM_0 = Channel(
    0, "activation", "relu_1", source=0, target=2, sender="d0", receiver="d2",
    shape=(2, 8, 32, 32), dtype=torch.float32, requires_grad=True,
)
X_2_FROM_0 = Channel(
    1, "activation", "relu_3", source=0, target=2, sender="d0", receiver="d2",
    shape=(2, 16, 16, 16), dtype=torch.float32, requires_grad=True,
)
GROW_FROM_1 = Channel(
    3, "activation", "conv_transpose2d_1", source=1, target=2, sender="d1", receiver="d2",
    shape=(2, 16, 16, 16), dtype=torch.float32, requires_grad=True,
)
X_GRAD_TO_0 = Channel(
    4, "gradient", "relu_1", source=2, target=0, sender="d2", receiver="d0",
    shape=(2, 8, 32, 32), dtype=torch.float32,
)
X_2_GRAD_TO_0 = Channel(
    5, "gradient", "relu_3", source=2, target=0, sender="d2", receiver="d0",
    shape=(2, 16, 16, 16), dtype=torch.float32,
)
GROW_GRAD_TO_1 = Channel(
    7, "gradient", "conv_transpose2d_1", source=2, target=1, sender="d2", receiver="d1",
    shape=(2, 16, 16, 16), dtype=torch.float32,
)


class DeviceD2(Device):
    """What d2 does in one step; `step_once` at the end is the schedule."""

    name = "d2"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {2: Stage2}
    loss = (2, "binary_cross_entropy_with_logits")
    channels = (X_FROM_0, X_2_FROM_0, GROW_FROM_1, X_GRAD_TO_0, X_2_GRAD_TO_0, GROW_GRAD_TO_1)

    def forward_2(self, m: int) -> None:
        x = self.recv(X_FROM_0, m)  # from d0
        x_2 = self.recv(X_2_FROM_0, m)  # from d0
        grow = self.recv(GROW_FROM_1, m)  # from d1
        batch_1 = self.batch("batch_1", m)
        self.forward(2, m, x=x, x_2=x_2, grow=grow, batch_1=batch_1)

    def backward_2(self, m: int) -> None:
        x_grad, x_2_grad, grow_grad = self.backward(2, m)
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0
        self.send(X_2_GRAD_TO_0, m, x_2_grad)  # to d0
        self.send(GROW_GRAD_TO_1, m, grow_grad)  # to d1

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(4):
            self.forward_2(m)
        for m in range(4):
            self.backward_2(m)
        self.update()
