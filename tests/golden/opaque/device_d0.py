"""Device d0: stage 0 of 2 of MoE.

    [d0] --> d1      1f1b, 2 micro-batches of 8

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .functions import user_model
    from .runtime import Channel, Device, Stage, Tensors, flat, part_of
else:
    from functions import user_model
    from runtime import Channel, Device, Stage, Tensors, flat, part_of


class Stage0(Stage):
    """Stage 0, for device d0: embed to blocks.1."""

    returns = ("imbalance", "x", "transpose")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.position = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(
            [
                Tensors(
                    norm1=nn.LayerNorm(64),
                    qkv=nn.Linear(64, 192),
                    out=nn.Linear(64, 64),
                    norm2=nn.LayerNorm(64),
                    mixture=part_of(user_model, "blocks.0.mixture"),
                ),
                Tensors(norm1=nn.LayerNorm(64), qkv=nn.Linear(64, 192)),
            ],
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(32, device=tokens.device)  # moe.py:120
        x = self.embed(tokens) + self.position(positions)  # moe.py:121
        # moe.py:87
        chunk, chunk_2, chunk_3 = self.blocks[0].qkv(self.blocks[0].norm1(x)).chunk(3, dim=-1)
        q = chunk.unflatten(-1, (4, -1)).transpose(1, 2)  # moe.py:94
        k = chunk_2.unflatten(-1, (4, -1)).transpose(1, 2)
        v = chunk_3.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # moe.py:88
        x = x + self.blocks[0].out(mixed.transpose(1, 2).flatten(2))  # moe.py:89
        y, imbalance = flat(self.blocks[0].mixture(self.blocks[0].norm2(x)))  # moe.py:90
        x = x + y  # moe.py:91
        # moe.py:87
        chunk, chunk_2, chunk_3 = self.blocks[1].qkv(self.blocks[1].norm1(x)).chunk(3, dim=-1)
        q = chunk.unflatten(-1, (4, -1)).transpose(1, 2)  # moe.py:94
        k = chunk_2.unflatten(-1, (4, -1)).transpose(1, 2)
        v = chunk_3.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # moe.py:88
        transpose = mixed.transpose(1, 2)  # moe.py:89
        return imbalance, x, transpose


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
IMBALANCE_TO_1 = Channel(
    0, "activation", "getitem_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(), dtype=torch.float32, requires_grad=True,
)
X_TO_1 = Channel(
    1, "activation", "add_2", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 64), dtype=torch.float32, requires_grad=True,
)
TRANSPOSE_TO_1 = Channel(
    2, "activation", "transpose_7", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 4, 16), dtype=torch.float32, requires_grad=True,
)
IMBALANCE_GRAD_FROM_1 = Channel(
    3, "gradient", "getitem_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(), dtype=torch.float32,
)
X_GRAD_FROM_1 = Channel(
    4, "gradient", "add_2", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 64), dtype=torch.float32,
)
TRANSPOSE_GRAD_FROM_1 = Channel(
    5, "gradient", "transpose_7", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 4, 16), dtype=torch.float32,
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 2
    stages = {0: Stage0}
    channels = (
        IMBALANCE_TO_1,
        X_TO_1,
        TRANSPOSE_TO_1,
        IMBALANCE_GRAD_FROM_1,
        X_GRAD_FROM_1,
        TRANSPOSE_GRAD_FROM_1,
    )

    def forward_0(self, m: int) -> None:
        tokens = self.batch("tokens", m)
        imbalance, x, transpose = self.forward(0, m, tokens=tokens)
        self.send(IMBALANCE_TO_1, m, imbalance)  # to d1
        self.send(X_TO_1, m, x)  # to d1
        self.send(TRANSPOSE_TO_1, m, transpose)  # to d1

    def backward_0(self, m: int) -> None:
        imbalance_grad = self.recv(IMBALANCE_GRAD_FROM_1, m)  # from d1
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        transpose_grad = self.recv(TRANSPOSE_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, imbalance=imbalance_grad, x=x_grad, transpose=transpose_grad)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_0(m)
        for m in range(2):
            self.backward_0(m)
        self.update()
