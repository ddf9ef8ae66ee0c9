"""Device d0: stage 0 of 2 of MoE.

    [d0] --> d1      1f1b, 2 micro-batches of 8

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .model_blocks import Block
    from .runtime import Channel, Device, Stage, Tensors
else:
    from model_blocks import Block
    from runtime import Channel, Device, Stage, Tensors


class Stage0(Stage):
    """Stage 0, for device d0: embed to blocks.1."""

    returns = ("imbalance", "x", "norm2", "likes", "weight", "chosen", "queue")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.position = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(
            [
                Block(),
                Tensors(
                    norm1=nn.LayerNorm(64),
                    qkv=nn.Linear(64, 192),
                    out=nn.Linear(64, 64),
                    norm2=nn.LayerNorm(64),
                    mixture=Tensors(router=nn.Linear(64, 4, bias=False)),
                ),
            ],
        )

    def forward(self, tokens: Tensor) -> tuple[
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
    ]:
        positions = torch.arange(32, device=tokens.device)  # moe.py:120
        x = self.embed(tokens) + self.position(positions)  # moe.py:121
        x, imbalance = self.blocks[0](x)  # moe.py:124
        # moe.py:87
        chunk, chunk_2, chunk_3 = self.blocks[1].qkv(self.blocks[1].norm1(x)).chunk(3, dim=-1)
        q = chunk.unflatten(-1, (4, -1)).transpose(1, 2)  # moe.py:94
        k = chunk_2.unflatten(-1, (4, -1)).transpose(1, 2)
        v = chunk_3.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # moe.py:88
        x = x + self.blocks[1].out(mixed.transpose(1, 2).flatten(2))  # moe.py:89
        norm2 = self.blocks[1].norm2(x)  # moe.py:90
        likes = F.softmax(self.blocks[1].mixture.router(norm2), dim=-1)  # moe.py:45
        weight, choice = torch.topk(likes, 2)  # moe.py:57
        weight = weight / weight.sum(dim=-1, keepdim=True)  # moe.py:58
        chosen = F.one_hot(choice, 4)  # moe.py:59
        batch = tokens.size(0)
        queue = torch.cumsum(chosen.transpose(1, 2).reshape(batch, -1, 4), dim=1) - 1  # moe.py:61
        queue = queue.view(batch, 2, 32, 4).transpose(1, 2)  # moe.py:62
        return imbalance, x, norm2, likes, weight, chosen, queue


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
IMBALANCE_TO_1 = Channel(
    0, "activation", "mul_3", source=0, target=1, sender="d0", receiver="d1",
    shape=(), dtype=torch.float32, requires_grad=True,
)
X_TO_1 = Channel(
    1, "activation", "add_3", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 64), dtype=torch.float32, requires_grad=True,
)
NORM2_TO_1 = Channel(
    2, "activation", "layer_norm_3", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 64), dtype=torch.float32, requires_grad=True,
)
LIKES_TO_1 = Channel(
    3, "activation", "softmax_1", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 4), dtype=torch.float32, requires_grad=True,
)
WEIGHT_TO_1 = Channel(
    4, "activation", "div_1", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2), dtype=torch.float32, requires_grad=True,
)
CHOSEN_TO_1 = Channel(
    5, "activation", "one_hot_2", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2, 4), dtype=torch.int64,
)
QUEUE_TO_1 = Channel(
    6, "activation", "transpose_11", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2, 4), dtype=torch.int64,
)
IMBALANCE_GRAD_FROM_1 = Channel(
    7, "gradient", "mul_3", source=1, target=0, sender="d1", receiver="d0",
    shape=(), dtype=torch.float32,
)
X_GRAD_FROM_1 = Channel(
    8, "gradient", "add_3", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 64), dtype=torch.float32,
)
NORM2_GRAD_FROM_1 = Channel(
    9, "gradient", "layer_norm_3", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 64), dtype=torch.float32,
)
LIKES_GRAD_FROM_1 = Channel(
    10, "gradient", "softmax_1", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 4), dtype=torch.float32,
)
WEIGHT_GRAD_FROM_1 = Channel(
    11, "gradient", "div_1", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 2), dtype=torch.float32,
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
        NORM2_TO_1,
        LIKES_TO_1,
        WEIGHT_TO_1,
        CHOSEN_TO_1,
        QUEUE_TO_1,
        IMBALANCE_GRAD_FROM_1,
        X_GRAD_FROM_1,
        NORM2_GRAD_FROM_1,
        LIKES_GRAD_FROM_1,
        WEIGHT_GRAD_FROM_1,
    )

    def forward_0(self, m: int) -> None:
        tokens = self.batch("tokens", m)
        imbalance, x, norm2, likes, weight, chosen, queue = self.forward(0, m, tokens=tokens)
        self.send(IMBALANCE_TO_1, m, imbalance)  # to d1
        self.send(X_TO_1, m, x)  # to d1
        self.send(NORM2_TO_1, m, norm2)  # to d1
        self.send(LIKES_TO_1, m, likes)  # to d1
        self.send(WEIGHT_TO_1, m, weight)  # to d1
        self.send(CHOSEN_TO_1, m, chosen)  # to d1
        self.send(QUEUE_TO_1, m, queue)  # to d1

    def backward_0(self, m: int) -> None:
        imbalance_grad = self.recv(IMBALANCE_GRAD_FROM_1, m)  # from d1
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        norm2_grad = self.recv(NORM2_GRAD_FROM_1, m)  # from d1
        likes_grad = self.recv(LIKES_GRAD_FROM_1, m)  # from d1
        weight_grad = self.recv(WEIGHT_GRAD_FROM_1, m)  # from d1
        self.backward(
            0,
            m,
            imbalance=imbalance_grad,
            x=x_grad,
            norm2=norm2_grad,
            likes=likes_grad,
            weight=weight_grad,
        )

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_0(m)
        for m in range(2):
            self.backward_0(m)
        self.update()
