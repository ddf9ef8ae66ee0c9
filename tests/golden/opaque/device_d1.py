"""Device d1: stage 1 of 2 of MoE.

    d0 --> [d1]      1f1b, 2 micro-batches of 8

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .functions import user_model
    from .runtime import Channel, Device, Stage, Tensors, flat, part_of
else:
    from functions import user_model
    from runtime import Channel, Device, Stage, Tensors, flat, part_of


class Stage1(Stage):
    """Stage 1, for device d1: blocks.1 to head."""

    returns = ("add",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Tensors(
            {
                1: Tensors(
                    out=nn.Linear(64, 64),
                    norm2=nn.LayerNorm(64),
                    mixture=part_of(user_model, "blocks.1.mixture"),
                ),
                2: Tensors(
                    norm1=nn.LayerNorm(64),
                    qkv=nn.Linear(64, 192),
                    out=nn.Linear(64, 64),
                    norm2=nn.LayerNorm(64),
                    mixture=part_of(user_model, "blocks.2.mixture"),
                ),
            },
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, imbalance: Tensor, x: Tensor, transpose: Tensor, targets: Tensor) -> Tensor:
        x = x + self.blocks[1].out(transpose.flatten(2))  # moe.py:89
        y, imbalance_2 = flat(self.blocks[1].mixture(self.blocks[1].norm2(x)))  # moe.py:90
        x = x + y  # moe.py:91
        # moe.py:87
        chunk, chunk_2, chunk_3 = self.blocks[2].qkv(self.blocks[2].norm1(x)).chunk(3, dim=-1)
        q = chunk.unflatten(-1, (4, -1)).transpose(1, 2)  # moe.py:94
        k = chunk_2.unflatten(-1, (4, -1)).transpose(1, 2)
        v = chunk_3.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # moe.py:88
        x = x + self.blocks[2].out(mixed.transpose(1, 2).flatten(2))  # moe.py:89
        y, imbalance_3 = flat(self.blocks[2].mixture(self.blocks[2].norm2(x)))  # moe.py:90
        x = x + y  # moe.py:91
        head = self.head(self.norm(x))  # moe.py:126
        mean = torch.stack([imbalance, imbalance_2, imbalance_3]).mean()
        error = F.cross_entropy(head.flatten(0, 1), targets.flatten())  # moe.py:137
        return error + mean * 0.01  # moe.py:138


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
IMBALANCE_FROM_0 = Channel(
    0, "activation", "getitem_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(), dtype=torch.float32, requires_grad=True,
)
X_FROM_0 = Channel(
    1, "activation", "add_2", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 64), dtype=torch.float32, requires_grad=True,
)
TRANSPOSE_FROM_0 = Channel(
    2, "activation", "transpose_7", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 4, 16), dtype=torch.float32, requires_grad=True,
)
IMBALANCE_GRAD_TO_0 = Channel(
    3, "gradient", "getitem_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(), dtype=torch.float32,
)
X_GRAD_TO_0 = Channel(
    4, "gradient", "add_2", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 64), dtype=torch.float32,
)
TRANSPOSE_GRAD_TO_0 = Channel(
    5, "gradient", "transpose_7", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 4, 16), dtype=torch.float32,
)


class DeviceD1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 2
    stages = {1: Stage1}
    loss = (1, "add")
    channels = (
        IMBALANCE_FROM_0,
        X_FROM_0,
        TRANSPOSE_FROM_0,
        IMBALANCE_GRAD_TO_0,
        X_GRAD_TO_0,
        TRANSPOSE_GRAD_TO_0,
    )

    def forward_1(self, m: int) -> None:
        imbalance = self.recv(IMBALANCE_FROM_0, m)  # from d0
        x = self.recv(X_FROM_0, m)  # from d0
        transpose = self.recv(TRANSPOSE_FROM_0, m)  # from d0
        targets = self.batch("targets", m)
        self.forward(1, m, imbalance=imbalance, x=x, transpose=transpose, targets=targets)

    def backward_1(self, m: int) -> None:
        imbalance_grad, x_grad, transpose_grad = self.backward(1, m)
        self.send(IMBALANCE_GRAD_TO_0, m, imbalance_grad)  # to d0
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0
        self.send(TRANSPOSE_GRAD_TO_0, m, transpose_grad)  # to d0

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
