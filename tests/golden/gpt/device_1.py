"""Device d1: stage 1 of 2 of GPT.

    d0 --> [d1]      1f1b, 4 micro-batches of 4

Written by bigbrain-fx; needs torch only.
"""

import torch
import torch.nn.functional as F

if __package__:  # imported as part of a package: `from bundle.device_0 import Stage0`
    from .runtime import Channel, Device, Region, Stage, Tensors
else:
    from runtime import Channel, Device, Region, Stage, Tensors


class Block(Region):
    """Block, such as `blocks.0` of the model, first in gpt.py:62."""

    def __init__(self):
        super().__init__(
            norm1=Tensors(weight=(128,), bias=(128,)),
            attention=Tensors(
                qkv=Tensors(weight=(384, 128), bias=(384,)),
                out=Tensors(weight=(128, 128), bias=(128,)),
            ),
            norm2=Tensors(weight=(128,), bias=(128,)),
            up=Tensors(weight=(512, 128), bias=(512,)),
            down=Tensors(weight=(128, 512), bias=(128,)),
        )

    def forward(self, x):
        norm1 = F.layer_norm(x, (128,), self.norm1.weight, self.norm1.bias)  # gpt.py:62
        batch = x.size(0)
        split = F.linear(
            norm1, self.attention.qkv.weight, self.attention.qkv.bias
        ).view(batch, 64, 3, 4, 32)  # gpt.py:41
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()  # gpt.py:42
        with self.key("attention"):
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)  # gpt.py:44
        out = F.linear(
            mixed.transpose(1, 2).reshape(batch, 64, 128),
            self.attention.out.weight,
            self.attention.out.bias,
        )  # gpt.py:45
        with self.key("drop", 0, 2):
            drop = F.dropout(out, 0.1)  # gpt.py:62
        x = x + drop
        up = F.linear(
            F.layer_norm(x, (128,), self.norm2.weight, self.norm2.bias),
            self.up.weight,
            self.up.bias,
        )  # gpt.py:63
        down = F.linear(F.gelu(up), self.down.weight, self.down.bias)
        with self.key("drop", 1, 2):
            drop = F.dropout(down, 0.1)
        return x + drop


class Stage1(Stage):
    """Stage 1, for device d1: blocks.2 to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self):
        super().__init__(
            blocks=Tensors({i: Block() for i in range(2, 4)}),
            norm=Tensors(weight=(128,), bias=(128,)),
            head=Tensors(weight=(256, 128)),
        )

    def forward(self, add, targets):
        for block in self.blocks.children():
            add = block(add)
        head = F.linear(
            F.layer_norm(add, (128,), self.norm.weight, self.norm.bias), self.head.weight
        )  # gpt.py:96
        return F.cross_entropy(head.flatten(0, 1), targets.flatten())  # gpt.py:106


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
ADD_FROM_0 = Channel(
    0, "activation", "add_4", 0, 1, "d0", "d1", (4, 64, 128), torch.float32, requires_grad=True
)
ADD_GRAD_TO_0 = Channel(1, "gradient", "add_4", 1, 0, "d1", "d0", (4, 64, 128), torch.float32)
EMBED_WEIGHT_GRAD_TO_0 = Channel(
    2, "tied", "embed.weight", 1, 0, "d1", "d0", (256, 128), torch.float32
)
EMBED_WEIGHT_GRAD_FROM_0 = Channel(
    3, "tied", "embed.weight", 0, 1, "d0", "d1", (256, 128), torch.float32
)


class Device1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {1: Stage1}
    loss = (1, "cross_entropy_loss")
    channels = (ADD_FROM_0, ADD_GRAD_TO_0, EMBED_WEIGHT_GRAD_TO_0, EMBED_WEIGHT_GRAD_FROM_0)
    tied = {"embed.weight": (0, 1)}
    aliases = {"head.weight": "embed.weight"}

    def forward_1(self, m):
        add = self.recv(ADD_FROM_0, m)  # from d0
        targets = self.batch("targets", m)
        self.forward(1, m, add=add, targets=targets)

    def backward_1(self, m):
        add_grad = self.backward(1, m)
        self.send(ADD_GRAD_TO_0, m, add_grad)  # to d0

    def update(self):
        self.send_tied(EMBED_WEIGHT_GRAD_TO_0)  # to d0
        self.recv_tied(EMBED_WEIGHT_GRAD_FROM_0)  # from d0
        self.optimizer_step()

    def step_once(self):
        for m in range(4):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
