"""Device d0: stage 0 of 2 of Net, replica 0 of 2.

    [d0]      1f1b, 4 micro-batches of 16

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .runtime import Channel, Device, Stage, bucket_channels
else:
    from runtime import Channel, Device, Stage, bucket_channels


class Stage0(Stage):
    """Stage 0, for device d0: conv1 to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(128, 64)
        self.head = nn.Linear(64, 10)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.1)

    def forward(self, images: Tensor, batch_1: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(images)))  # digits.py:37
        x = self.pool(F.relu(self.conv2(x)))  # digits.py:38
        with self.seeded("drop"):
            x = self.drop(F.relu(self.hidden(x.flatten(1))))  # digits.py:39
        return F.cross_entropy(self.head(x), batch_1)  # digits.py:51


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
LOSSES_FROM_1 = Channel(
    4, "loss", "cross_entropy_loss", source=1, target=0, sender="d1", receiver="d0",
    shape=(2,), dtype=torch.float32,
)
# Sums of gradients over replicas: buckets.json says which channels.
BUCKETS = bucket_channels(__file__, "d0")


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    micros = ((0, 2), (1, 3))
    replica = 0
    sum_order = "micro"
    # weights that other replicas keep: gathered for each run of a stage, then freed
    zero_stage = 3
    stages = {0: Stage0}
    loss = (0, "cross_entropy_loss")
    channels = (LOSSES_FROM_1, *BUCKETS)

    def forward_0(self, m: int) -> None:
        images = self.batch("images", m)
        batch_1 = self.batch("batch_1", m)
        self.forward(0, m, images=images, batch_1=batch_1)

    def backward_0(self, m: int) -> None:
        self.backward(0, m)
        self.reduce_gradients(0, m)  # with d1

    def update(self) -> None:
        self.sum_gradients()  # over all replicas
        self.recv_losses(LOSSES_FROM_1, 1)  # from d1
        self.optimizer_step()

    def step_once(self) -> None:
        own = self.micros[self.replica]  # its micro-batches
        for i in range(2):
            self.forward_0(own[i])
            self.backward_0(own[i])
        self.update()
