"""Device d1: stage 1 of 2 of MoE.

    d0 --> [d1]      1f1b, 2 micro-batches of 8

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
    """Stage 1, for device d1: blocks.1 to head."""

    returns = ("add",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Tensors(
            {1: Tensors(mixture=Tensors(up=(4, 64, 128), down=(4, 128, 64))), 2: Block()}
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 32, bias=False)

    def forward(
        self,
        imbalance: Tensor,
        x: Tensor,
        norm2: Tensor,
        likes: Tensor,
        weight: Tensor,
        chosen: Tensor,
        queue: Tensor,
        targets: Tensor,
    ) -> Tensor:
        place = queue.unsqueeze(4) == torch.arange(20, device=imbalance.device)  # moe.py:63
        seat = place.float() * chosen.unsqueeze(4).float()  # moe.py:64
        combine = (weight.unsqueeze(3).unsqueeze(4) * seat).sum(dim=2)  # moe.py:65
        dispatch = (combine > 0).float()  # moe.py:47
        taken = torch.einsum("btec,btd->becd", dispatch, norm2)  # moe.py:48
        # moe.py:49
        hidden = F.gelu(torch.einsum("becd,edh->bech", taken, self.blocks[1].mixture.up))
        given = torch.einsum("bech,ehd->becd", hidden, self.blocks[1].mixture.down)  # moe.py:50
        y = torch.einsum("btec,becd->btd", combine, given)  # moe.py:51
        share = F.one_hot(likes.argmax(dim=-1), 4).float().mean(dim=(0, 1))  # moe.py:69
        imbalance_2 = (share * likes.mean(dim=(0, 1))).sum() * 4  # moe.py:70
        x = x + y  # moe.py:91
        x, imbalance_3 = self.blocks[2](x)  # moe.py:124
        head = self.head(self.norm(x))  # moe.py:126
        mean = torch.stack([imbalance, imbalance_2, imbalance_3]).mean()
        error = F.cross_entropy(head.flatten(0, 1), targets.flatten())  # moe.py:137
        return error + mean * 0.01  # moe.py:138


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
IMBALANCE_FROM_0 = Channel(
    0, "activation", "mul_3", source=0, target=1, sender="d0", receiver="d1",
    shape=(), dtype=torch.float32, requires_grad=True,
)
X_FROM_0 = Channel(
    1, "activation", "add_3", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 64), dtype=torch.float32, requires_grad=True,
)
NORM2_FROM_0 = Channel(
    2, "activation", "layer_norm_3", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 64), dtype=torch.float32, requires_grad=True,
)
LIKES_FROM_0 = Channel(
    3, "activation", "softmax_1", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 4), dtype=torch.float32, requires_grad=True,
)
WEIGHT_FROM_0 = Channel(
    4, "activation", "div_1", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2), dtype=torch.float32, requires_grad=True,
)
CHOSEN_FROM_0 = Channel(
    5, "activation", "one_hot_2", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2, 4), dtype=torch.int64,
)
QUEUE_FROM_0 = Channel(
    6, "activation", "transpose_11", source=0, target=1, sender="d0", receiver="d1",
    shape=(8, 32, 2, 4), dtype=torch.int64,
)
IMBALANCE_GRAD_TO_0 = Channel(
    7, "gradient", "mul_3", source=1, target=0, sender="d1", receiver="d0",
    shape=(), dtype=torch.float32,
)
X_GRAD_TO_0 = Channel(
    8, "gradient", "add_3", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 64), dtype=torch.float32,
)
NORM2_GRAD_TO_0 = Channel(
    9, "gradient", "layer_norm_3", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 64), dtype=torch.float32,
)
LIKES_GRAD_TO_0 = Channel(
    10, "gradient", "softmax_1", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 4), dtype=torch.float32,
)
WEIGHT_GRAD_TO_0 = Channel(
    11, "gradient", "div_1", source=1, target=0, sender="d1", receiver="d0",
    shape=(8, 32, 2), dtype=torch.float32,
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
        NORM2_FROM_0,
        LIKES_FROM_0,
        WEIGHT_FROM_0,
        CHOSEN_FROM_0,
        QUEUE_FROM_0,
        IMBALANCE_GRAD_TO_0,
        X_GRAD_TO_0,
        NORM2_GRAD_TO_0,
        LIKES_GRAD_TO_0,
        WEIGHT_GRAD_TO_0,
    )

    def forward_1(self, m: int) -> None:
        imbalance = self.recv(IMBALANCE_FROM_0, m)  # from d0
        x = self.recv(X_FROM_0, m)  # from d0
        norm2 = self.recv(NORM2_FROM_0, m)  # from d0
        likes = self.recv(LIKES_FROM_0, m)  # from d0
        weight = self.recv(WEIGHT_FROM_0, m)  # from d0
        chosen = self.recv(CHOSEN_FROM_0, m)  # from d0
        queue = self.recv(QUEUE_FROM_0, m)  # from d0
        targets = self.batch("targets", m)
        self.forward(
            1,
            m,
            imbalance=imbalance,
            x=x,
            norm2=norm2,
            likes=likes,
            weight=weight,
            chosen=chosen,
            queue=queue,
            targets=targets,
        )

    def backward_1(self, m: int) -> None:
        imbalance_grad, x_grad, norm2_grad, likes_grad, weight_grad = self.backward(1, m)
        self.send(IMBALANCE_GRAD_TO_0, m, imbalance_grad)  # to d0
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0
        self.send(NORM2_GRAD_TO_0, m, norm2_grad)  # to d0
        self.send(LIKES_GRAD_TO_0, m, likes_grad)  # to d0
        self.send(WEIGHT_GRAD_TO_0, m, weight_grad)  # to d0

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
