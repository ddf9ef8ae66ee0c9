"""Device d0: stage 0 of 2 of Net.

    [d0] --> d1      zb-h1, 8 micro-batches of 8

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .runtime import Channel, Conv2d, DeferringDevice, Stage
else:
    from runtime import Channel, Conv2d, DeferringDevice, Stage


class Stage0(Stage):
    """Stage 0, for device d0: conv1 to conv2."""

    returns = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = Conv2d(1, 16, 3, padding=1)
        self.conv2 = Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(images)))  # digits.py:37
        return self.pool(F.relu(self.conv2(x)))  # digits.py:38


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_TO_1 = Channel(
    0, "activation", "max_pool2d_1", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2, 2), dtype=torch.float32, requires_grad=True,
)
X_GRAD_FROM_1 = Channel(
    1, "gradient", "max_pool2d_1", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 2, 2), dtype=torch.float32,
)


class DeviceD0(DeferringDevice):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 8
    stages = {0: Stage0}
    # Conv2d: their weights' gradients wait for weights_N
    deferring = (0,)
    channels = (X_TO_1, X_GRAD_FROM_1)

    def forward_0(self, m: int) -> None:
        images = self.batch("images", m)
        x = self.forward(0, m, images=images)
        self.send(X_TO_1, m, x)  # to d1

    def backward_0(self, m: int) -> None:  # gradients of weights wait for weights_0
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, x=x_grad)

    def weights_0(self, m: int) -> None:
        self.backward_weight(0, m)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_0(m)
        for m in range(6):
            self.backward_0(m)
            self.weights_0(m)
            self.forward_0(m + 2)
        for m in range(6, 8):
            self.backward_0(m)
            self.weights_0(m)
        self.update()
