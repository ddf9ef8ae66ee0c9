"""Device d0: stage 0 of 3 of UNet.

    [d0] --> d1 --> d2      gpipe, 4 micro-batches of 2

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .model_blocks import DoubleConv
    from .runtime import Channel, Device, Stage, Tensors
else:
    from model_blocks import DoubleConv
    from runtime import Channel, Device, Stage, Tensors


class Stage0(Stage):
    """Stage 0, for device d0: inlet.conv1 to down.1."""

    returns = ("x", "x_2", "conv2")

    def __init__(self) -> None:
        super().__init__()
        self.inlet = DoubleConv(1, 8)
        self.down = nn.ModuleList(
            [
                DoubleConv(8, 16),
                Tensors(
                    conv1=nn.Conv2d(16, 32, 3, padding=1),
                    norm1=nn.GroupNorm(4, 32),
                    conv2=nn.Conv2d(32, 32, 3, padding=1),
                ),
            ],
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.inlet(image)  # unet.py:66
        down_0 = self.down[0](F.max_pool2d(x, 2))  # unet.py:70
        x_2 = F.relu(self.down[1].norm1(self.down[1].conv1(F.max_pool2d(down_0, 2))))  # unet.py:36
        conv2 = self.down[1].conv2(x_2)  # unet.py:37
        return x, down_0, conv2


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_TO_2 = Channel(
    0, "activation", "relu_1", source=0, target=2, sender="d0", receiver="d2",
    shape=(2, 8, 32, 32), dtype=torch.float32, requires_grad=True,
)
X_2_TO_2 = Channel(
    1, "activation", "relu_3", source=0, target=2, sender="d0", receiver="d2",
    shape=(2, 16, 16, 16), dtype=torch.float32, requires_grad=True,
)
CONV2_TO_1 = Channel(
    2, "activation", "conv2d_5", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 32, 8, 8), dtype=torch.float32, requires_grad=True,
)
X_GRAD_FROM_2 = Channel(
    4, "gradient", "relu_1", source=2, target=0, sender="d2", receiver="d0",
    shape=(2, 8, 32, 32), dtype=torch.float32,
)
X_2_GRAD_FROM_2 = Channel(
    5, "gradient", "relu_3", source=2, target=0, sender="d2", receiver="d0",
    shape=(2, 16, 16, 16), dtype=torch.float32,
)
CONV2_GRAD_FROM_1 = Channel(
    6, "gradient", "conv2d_5", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 32, 8, 8), dtype=torch.float32,
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {0: Stage0}
    channels = (X_TO_2, X_2_TO_2, CONV2_TO_1, X_GRAD_FROM_2, X_2_GRAD_FROM_2, CONV2_GRAD_FROM_1)

    def forward_0(self, m: int) -> None:
        image = self.batch("image", m)
        x, x_2, conv2 = self.forward(0, m, image=image)
        self.send(X_TO_2, m, x)  # to d2
        self.send(X_2_TO_2, m, x_2)  # to d2
        self.send(CONV2_TO_1, m, conv2)  # to d1

    def backward_0(self, m: int) -> None:
        x_grad = self.recv(X_GRAD_FROM_2, m)  # from d2
        x_2_grad = self.recv(X_2_GRAD_FROM_2, m)  # from d2
        conv2_grad = self.recv(CONV2_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, x=x_grad, x_2=x_2_grad, conv2=conv2_grad)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(4):
            self.forward_0(m)
        for m in range(4):
            self.backward_0(m)
        self.update()
