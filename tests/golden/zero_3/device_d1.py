"""Device d1: stage 1 of 2 of Net, replica 1 of 2.

    [d1]      1f1b, 4 micro-batches of 16

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .runtime import Channel, Device, Stage, bucket_channels
else:
    from runtime import Channel, Device, Stage, bucket_channels


class Stage1(Stage):
    """Stage 1, for device d1: conv1 to head."""

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
LOSSES_TO_0 = Channel(
    4, "loss", "cross_entropy_loss", source=1, target=0, sender="d1", receiver="d0",
    shape=(2,), dtype=torch.float32,
)
# Sums of gradients over replicas: buckets.json says which channels.
BUCKETS = bucket_channels(__file__, "d1")


class DeviceD1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 4
    micros = ((0, 2), (1, 3))
    replica = 1
    sum_order = "micro"
    # weights that other replicas keep: gathered for each run of a stage, then freed
    zero_stage = 3
    stages = {1: Stage1}
    loss = (1, "cross_entropy_loss")
    channels = (LOSSES_TO_0, *BUCKETS)

    def forward_1(self, m: int) -> None:
        images = self.batch("images", m)
        batch_1 = self.batch("batch_1", m)
        self.forward(1, m, images=images, batch_1=batch_1)

    def backward_1(self, m: int) -> None:
        self.backward(1, m)
        self.reduce_gradients(1, m)  # with d0

    def update(self) -> None:
        self.sum_gradients()  # over all replicas
        self.send_losses(LOSSES_TO_0)  # to d0
        self.optimizer_step()

    def step_once(self) -> None:
        own = self.micros[self.replica]  # its micro-batches
        for i in range(2):
            self.forward_1(own[i])
            self.backward_1(own[i])
        self.update()
