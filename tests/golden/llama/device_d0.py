"""Device d0: stage 0 of 2 of Llama.

    [d0] --> d1      1f1b, 4 micro-batches of 4

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .model_blocks import Block, Rotary
    from .runtime import Channel, Device, Stage
else:
    from model_blocks import Block, Rotary
    from runtime import Channel, Device, Stage


class Stage0(Stage):
    """Stage 0, for device d0: embed to blocks.1."""

    returns = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.rotary = Rotary()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # llama.py:155
        cos, sin = self.rotary()  # llama.py:156
        for block in self.blocks:  # llama.py:158
            x = block(x, cos, sin)
        return x


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_TO_1 = Channel(
    0, "activation", "add_11", source=0, target=1, sender="d0", receiver="d1",
    shape=(4, 62, 64), dtype=torch.float32, requires_grad=True,
)
X_GRAD_FROM_1 = Channel(
    1, "gradient", "add_11", source=1, target=0, sender="d1", receiver="d0",
    shape=(4, 62, 64), dtype=torch.float32,
)
NORMS_TO_1 = Channel(
    2, "norm", "norms", source=0, target=1, sender="d0", receiver="d1",
    shape=(19,), dtype=torch.float32,
)
NORMS_FROM_1 = Channel(
    3, "norm", "norms", source=1, target=0, sender="d1", receiver="d0",
    shape=(20,), dtype=torch.float32,
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {0: Stage0}
    channels = (X_TO_1, X_GRAD_FROM_1, NORMS_TO_1, NORMS_FROM_1)

    def forward_0(self, m: int) -> None:
        tokens = self.batch("tokens", m)
        x = self.forward(0, m, tokens=tokens)
        self.send(X_TO_1, m, x)  # to d1

    def backward_0(self, m: int) -> None:
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, x=x_grad)

    def update(self) -> None:
        self.send_norms(NORMS_TO_1)  # to d1
        self.recv_norms(NORMS_FROM_1)  # from d1
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
