"""Device d1: stage 1 of 2 of Llama.

    d0 --> [d1]      1f1b, 4 micro-batches of 4

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .model_blocks import Block, RMSNorm, Rotary
    from .runtime import Channel, Device, Stage, Tensors
else:
    from model_blocks import Block, RMSNorm, Rotary
    from runtime import Channel, Device, Stage, Tensors


class Stage1(Stage):
    """Stage 1, for device d1: rotary to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Tensors({i: Block() for i in range(2, 4)})
        self.norm = RMSNorm()
        self.head = nn.Linear(64, 13, bias=False)
        self.rotary = Rotary()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        cos, sin = self.rotary()  # llama.py:156
        for block in self.blocks:  # llama.py:158
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))  # llama.py:159
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # llama.py:160


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_FROM_0 = Channel(
    0, "activation", "add_11", source=0, target=1, sender="d0", receiver="d1",
    shape=(4, 62, 64), dtype=torch.float32, requires_grad=True,
)
X_GRAD_TO_0 = Channel(
    1, "gradient", "add_11", source=1, target=0, sender="d1", receiver="d0",
    shape=(4, 62, 64), dtype=torch.float32,
)
NORMS_FROM_0 = Channel(
    2, "norm", "norms", source=0, target=1, sender="d0", receiver="d1",
    shape=(19,), dtype=torch.float32,
)
NORMS_TO_0 = Channel(
    3, "norm", "norms", source=1, target=0, sender="d1", receiver="d0",
    shape=(20,), dtype=torch.float32,
)


class DeviceD1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {1: Stage1}
    loss = (1, "cross_entropy_loss")
    channels = (X_FROM_0, X_GRAD_TO_0, NORMS_FROM_0, NORMS_TO_0)

    def forward_1(self, m: int) -> None:
        x = self.recv(X_FROM_0, m)  # from d0
        targets = self.batch("targets", m)
        self.forward(1, m, x=x, targets=targets)

    def backward_1(self, m: int) -> None:
        x_grad = self.backward(1, m)
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0

    def update(self) -> None:
        self.send_norms(NORMS_TO_0)  # to d0
        self.recv_norms(NORMS_FROM_0)  # from d0
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(4):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
