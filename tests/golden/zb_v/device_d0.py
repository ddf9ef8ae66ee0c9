"""Device d0: stages 0, 3 of 4 of Net.

    [d0] --> d1 --> [d0]      zb-v, 4 micro-batches of 16

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .runtime import Channel, Conv2d, DeferringDevice, Linear, Stage
else:
    from runtime import Channel, Conv2d, DeferringDevice, Linear, Stage


class Stage0(Stage):
    """Stage 0, for device d0: conv1."""

    returns = ("relu",)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = Conv2d(1, 16, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.conv1(images))  # digits.py:37


class Stage3(Stage):
    """Stage 3, for device d0: hidden to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Linear(128, 64)
        self.head = Linear(64, 10)
        self.drop = nn.Dropout(0.1)

    def forward(self, flatten: Tensor, batch_1: Tensor) -> Tensor:
        with self.seeded("drop"):
            x = self.drop(F.relu(self.hidden(flatten)))  # digits.py:39
        return F.cross_entropy(self.head(x), batch_1)  # digits.py:51


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
RELU_TO_1_AT_0 = Channel(
    0, "activation", "relu", source=0, target=1, sender="d0", receiver="d1",
    shape=(16, 16, 8, 8), dtype=torch.float32, requires_grad=True,
)
FLATTEN_FROM_2_AT_3 = Channel(
    2, "activation", "flatten", source=2, target=3, sender="d1", receiver="d0",
    shape=(16, 128), dtype=torch.float32, requires_grad=True,
)
RELU_GRAD_FROM_1_AT_0 = Channel(
    3, "gradient", "relu", source=1, target=0, sender="d1", receiver="d0",
    shape=(16, 16, 8, 8), dtype=torch.float32,
)
FLATTEN_GRAD_TO_2_AT_3 = Channel(
    5, "gradient", "flatten", source=3, target=2, sender="d0", receiver="d1",
    shape=(16, 128), dtype=torch.float32,
)


class DeviceD0(DeferringDevice):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {0: Stage0, 3: Stage3}
    # Conv2d, Linear: their weights' gradients wait for weights_N
    deferring = (0, 3)
    loss = (3, "cross_entropy_loss")
    channels = (RELU_TO_1_AT_0, FLATTEN_FROM_2_AT_3, RELU_GRAD_FROM_1_AT_0, FLATTEN_GRAD_TO_2_AT_3)

    def forward_0(self, m: int) -> None:
        images = self.batch("images", m)
        relu = self.forward(0, m, images=images)
        self.send(RELU_TO_1_AT_0, m, relu)  # to d1

    def backward_0(self, m: int) -> None:  # gradients of weights wait for weights_0
        relu_grad = self.recv(RELU_GRAD_FROM_1_AT_0, m)  # from d1
        self.backward(0, m, relu=relu_grad)

    def weights_0(self, m: int) -> None:
        self.backward_weight(0, m)

    def forward_3(self, m: int) -> None:
        flatten = self.recv(FLATTEN_FROM_2_AT_3, m)  # from d1
        batch_1 = self.batch("batch_1", m)
        self.forward(3, m, flatten=flatten, batch_1=batch_1)

    def backward_3(self, m: int) -> None:  # gradients of weights wait for weights_3
        flatten_grad = self.backward(3, m)
        self.send(FLATTEN_GRAD_TO_2_AT_3, m, flatten_grad)  # to d1

    def weights_3(self, m: int) -> None:
        self.backward_weight(3, m)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(3):
            self.forward_0(m)
        for m in range(2):
            self.forward_3(m)
            self.backward_3(m)
            self.weights_3(m)
        self.forward_0(3)
        for m in range(2):
            self.backward_0(m)
            self.weights_0(m)
            self.forward_3(m + 2)
            self.backward_3(m + 2)
            self.weights_3(m + 2)
        for m in range(2, 4):
            self.backward_0(m)
            self.weights_0(m)
        self.update()
