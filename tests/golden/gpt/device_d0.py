"""Device d0: stage 0 of 2 of GPT.

    [d0] --> d1      1f1b, 4 micro-batches of 4

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .model_blocks import Block
    from .runtime import Channel, Device, Stage
else:
    from model_blocks import Block
    from runtime import Channel, Device, Stage


class Stage0(Stage):
    """Stage 0, for device d0: embed to blocks.1.

    `embed.weight` is stage 1's `head.weight`: in a loop of your own, too, add up their
    gradients.
    """

    returns = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.position = nn.Embedding(64, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(64, device=tokens.device)  # gpt.py:92
        with self.seeded("drop"):
            x = self.drop(self.embed(tokens) + self.position(positions))  # gpt.py:93
        for block in self.blocks:  # gpt.py:95
            x = block(x)
        return x


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_TO_1 = Channel(
    0, "activation", "add_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(4, 64, 128), dtype=torch.float32, requires_grad=True,
)
X_GRAD_FROM_1 = Channel(
    1, "gradient", "add_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(4, 64, 128), dtype=torch.float32,
)
EMBED_WEIGHT_GRAD_FROM_1 = Channel(
    2, "tied", "embed.weight", source=1, target=0, sender="d1", receiver="d0",
    shape=(256, 128), dtype=torch.float32,
)
EMBED_WEIGHT_GRAD_TO_1 = Channel(
    3, "tied", "embed.weight", source=0, target=1, sender="d0", receiver="d1",
    shape=(256, 128), dtype=torch.float32,
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {0: Stage0}
    channels = (X_TO_1, X_GRAD_FROM_1, EMBED_WEIGHT_GRAD_FROM_1, EMBED_WEIGHT_GRAD_TO_1)
    tied = {"embed.weight": (0, 1)}

    def forward_0(self, m: int) -> None:
        tokens = self.batch("tokens", m)
        x = self.forward(0, m, tokens=tokens)
        self.send(X_TO_1, m, x)  # to d1

    def backward_0(self, m: int) -> None:
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, x=x_grad)

    def update(self) -> None:
        self.send_tied(EMBED_WEIGHT_GRAD_TO_1)  # to d1
        self.recv_tied(EMBED_WEIGHT_GRAD_FROM_1)  # from d1
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_0(m)
        for m in range(2):
            self.backward_0(m)
            self.forward_0(m + 2)
        for m in range(2, 4):
            self.backward_0(m)
        self.update()
