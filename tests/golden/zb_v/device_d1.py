"""Device d1: stages 1, 2 of 4 of Net.

    d0 --> [d1] --> d0      zb-v, 4 micro-batches of 16

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .runtime import Channel, Conv2d, DeferringDevice, Stage
else:
    from runtime import Channel, Conv2d, DeferringDevice, Stage


class Stage1(Stage):
    """Stage 1, for device d1: pool."""

    returns = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, relu: Tensor) -> Tensor:
        return self.pool(relu)  # digits.py:37


class Stage2(Stage):
    """Stage 2, for device d1: conv2 to pool."""

    returns = ("flatten",)

    def __init__(self) -> None:
        super().__init__()
        self.conv2 = Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv2(x)))  # digits.py:38
        return x.flatten(1)  # digits.py:39


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
RELU_FROM_0_AT_1 = Channel(
    0, "activation", "relu", source=0, target=1, sender="d0", receiver="d1",
    shape=(16, 16, 8, 8), dtype=torch.float32, requires_grad=True,
)
X_TO_2_AT_1 = Channel(
    1, "activation", "max_pool2d", source=1, target=2, sender="d1", receiver="d1",
    shape=(16, 16, 4, 4), dtype=torch.float32, requires_grad=True,
)
FLATTEN_TO_3_AT_2 = Channel(
    2, "activation", "flatten", source=2, target=3, sender="d1", receiver="d0",
    shape=(16, 128), dtype=torch.float32, requires_grad=True,
)
RELU_GRAD_TO_0_AT_1 = Channel(
    3, "gradient", "relu", source=1, target=0, sender="d1", receiver="d0",
    shape=(16, 16, 8, 8), dtype=torch.float32,
)
X_GRAD_TO_1_AT_2 = Channel(
    4, "gradient", "max_pool2d", source=2, target=1, sender="d1", receiver="d1",
    shape=(16, 16, 4, 4), dtype=torch.float32,
)
FLATTEN_GRAD_FROM_3_AT_2 = Channel(
    5, "gradient", "flatten", source=3, target=2, sender="d0", receiver="d1",
    shape=(16, 128), dtype=torch.float32,
)


class DeviceD1(DeferringDevice):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {1: Stage1, 2: Stage2}
    # Conv2d: their weights' gradients wait for weights_N
    deferring = (2,)
    channels = (
        RELU_FROM_0_AT_1,
        X_TO_2_AT_1,
        FLATTEN_TO_3_AT_2,
        RELU_GRAD_TO_0_AT_1,
        X_GRAD_TO_1_AT_2,
        FLATTEN_GRAD_FROM_3_AT_2,
    )

    def forward_1(self, m: int) -> None:
        relu = self.recv(RELU_FROM_0_AT_1, m)  # from d0
        x = self.forward(1, m, relu=relu)
        self.send(X_TO_2_AT_1, m, x)  # stays here

    def backward_1(self, m: int) -> None:
        x_grad = self.recv(X_GRAD_TO_1_AT_2, m)  # stays here
        relu_grad = self.backward(1, m, x=x_grad)
        self.send(RELU_GRAD_TO_0_AT_1, m, relu_grad)  # to d0

    def forward_2(self, m: int) -> None:
        x = self.recv(X_TO_2_AT_1, m)  # stays here
        flatten = self.forward(2, m, x=x)
        self.send(FLATTEN_TO_3_AT_2, m, flatten)  # to d0

    def backward_2(self, m: int) -> None:  # gradients of weights wait for weights_2
        flatten_grad = self.recv(FLATTEN_GRAD_FROM_3_AT_2, m)  # from d0
        x_grad = self.backward(2, m, flatten=flatten_grad)
        self.send(X_GRAD_TO_1_AT_2, m, x_grad)  # stays here

    def weights_2(self, m: int) -> None:
        self.backward_weight(2, m)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_1(m)
            self.forward_2(m)
        for m in range(2):
            self.backward_2(m)
            self.weights_2(m)
            self.forward_1(m + 2)
            self.backward_1(m)
            self.forward_2(m + 2)
        self.backward_2(2)
        self.weights_2(2)
        self.backward_1(2)
        self.backward_2(3)
        self.backward_1(3)
        self.weights_2(3)
        self.update()
