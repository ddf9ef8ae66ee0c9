"""Device d1: stage 1 of 2 of Net.

    d0 --> [d1]      zb-h1, 8 micro-batches of 8

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .runtime import Channel, DeferringDevice, Linear, Stage
else:
    from runtime import Channel, DeferringDevice, Linear, Stage


class Stage1(Stage):
    """Stage 1, for device d1: hidden to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Linear(128, 64)
        self.head = Linear(64, 10)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, batch_1: Tensor) -> Tensor:
        with self.seeded("drop"):
            x = self.drop(F.relu(self.hidden(x.flatten(1))))  # digits.py:39
        return F.cross_entropy(self.head(x), batch_1)  # digits.py:51


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_FROM_0 = Channel(
    0, "activation", "max_pool2d_1", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2, 2), dtype=torch.float32, requires_grad=True,
)
X_GRAD_TO_0 = Channel(
    1, "gradient", "max_pool2d_1", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 2, 2), dtype=torch.float32,
)


class DeviceD1(DeferringDevice):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 8
    stages = {1: Stage1}
    # Linear: their weights' gradients wait for weights_N
    deferring = (1,)
    loss = (1, "cross_entropy_loss")
    channels = (X_FROM_0, X_GRAD_TO_0)

    def forward_1(self, m: int) -> None:
        x = self.recv(X_FROM_0, m)  # from d0
        batch_1 = self.batch("batch_1", m)
        self.forward(1, m, x=x, batch_1=batch_1)

    def backward_1(self, m: int) -> None:  # gradients of weights wait for weights_1
        x_grad = self.backward(1, m)
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0

    def weights_1(self, m: int) -> None:
        self.backward_weight(1, m)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_1(m)
            self.backward_1(m)
        for m in range(6):
            self.weights_1(m)
            self.forward_1(m + 2)
            self.backward_1(m + 2)
        for m in range(6, 8):
            self.weights_1(m)
        self.update()
