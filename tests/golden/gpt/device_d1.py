"""Device d1: stage 1 of 2 of GPT.

    d0 --> [d1]      1f1b, 4 micro-batches of 4

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .model_blocks import Block
    from .runtime import Channel, Device, Stage, Tensors
else:
    from model_blocks import Block
    from runtime import Channel, Device, Stage, Tensors


class Stage1(Stage):
    """Stage 1, for device d1: blocks.2 to head.

    `head.weight` is stage 0's `embed.weight`: in a loop of your own, too, add up their
    gradients.
    """

    returns = ("cross_entropy_loss",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Tensors({i: Block() for i in range(2, 4)})
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 256, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:  # gpt.py:95
            x = block(x)
        # gpt.py:106
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_FROM_0 = Channel(
    0, "activation", "add_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(4, 64, 128), dtype=torch.float32, requires_grad=True,
)
X_GRAD_TO_0 = Channel(
    1, "gradient", "add_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(4, 64, 128), dtype=torch.float32,
)
EMBED_WEIGHT_GRAD_TO_0 = Channel(
    2, "tied", "embed.weight", source=1, target=0, sender="d1", receiver="d0",
    shape=(256, 128), dtype=torch.float32,
)
EMBED_WEIGHT_GRAD_FROM_0 = Channel(
    3, "tied", "embed.weight", source=0, target=1, sender="d0", receiver="d1",
    shape=(256, 128), dtype=torch.float32,
)


class DeviceD1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {1: Stage1}
    loss = (1, "cross_entropy_loss")
    channels = (X_FROM_0, X_GRAD_TO_0, EMBED_WEIGHT_GRAD_TO_0, EMBED_WEIGHT_GRAD_FROM_0)
    tied = {"embed.weight": (0, 1)}
    aliases = {"head.weight": "embed.weight"}

    def forward_1(self, m: int) -> None:
        x = self.recv(X_FROM_0, m)  # from d0
        targets = self.batch("targets", m)
        self.forward(1, m, x=x, targets=targets)

    def backward_1(self, m: int) -> None:
        x_grad = self.backward(1, m)
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0

    def update(self) -> None:
        self.send_tied(EMBED_WEIGHT_GRAD_TO_0)  # to d0
        self.recv_tied(EMBED_WEIGHT_GRAD_FROM_0)  # from d0
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(4):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
