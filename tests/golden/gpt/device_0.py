"""Device d0: stage 0 of 2 of GPT.

    [d0] --> d1      1f1b, 4 micro-batches of 4

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


class Stage0(Stage):
    """Stage 0, for device d0: embed to blocks.1."""

    returns = ("add",)

    def __init__(self):
        super().__init__(
            embed=Tensors(weight=(256, 128)),
            position=Tensors(weight=(64, 128)),
            blocks=Tensors({i: Block() for i in range(2)}),
        )

    def forward(self, tokens):
        positions = torch.arange(64, device=tokens.device)  # gpt.py:92
        add = F.embedding(tokens, self.embed.weight) + F.embedding(positions, self.position.weight)  # gpt.py:93
        with self.key("drop"):
            x = F.dropout(add, 0.1)
        for block in self.blocks.children():
            x = block(x)
        return x


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
ADD_TO_1 = Channel(
    0, "activation", "add_4", 0, 1, "d0", "d1", (4, 64, 128), torch.float32, requires_grad=True
)
ADD_GRAD_FROM_1 = Channel(1, "gradient", "add_4", 1, 0, "d1", "d0", (4, 64, 128), torch.float32)
EMBED_WEIGHT_GRAD_FROM_1 = Channel(
    2, "tied", "embed.weight", 1, 0, "d1", "d0", (256, 128), torch.float32
)
EMBED_WEIGHT_GRAD_TO_1 = Channel(
    3, "tied", "embed.weight", 0, 1, "d0", "d1", (256, 128), torch.float32
)


class Device0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    stages = {0: Stage0}
    channels = (ADD_TO_1, ADD_GRAD_FROM_1, EMBED_WEIGHT_GRAD_FROM_1, EMBED_WEIGHT_GRAD_TO_1)
    tied = {"embed.weight": (0, 1)}

    def forward_0(self, m):
        tokens = self.batch("tokens", m)
        add = self.forward(0, m, tokens=tokens)
        self.send(ADD_TO_1, m, add)  # to d1

    def backward_0(self, m):
        add_grad = self.recv(ADD_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, add=add_grad)

    def update(self):
        self.send_tied(EMBED_WEIGHT_GRAD_TO_1)  # to d1
        self.recv_tied(EMBED_WEIGHT_GRAD_FROM_1)  # from d1
        self.optimizer_step()

    def step_once(self):
        for m in range(2):
            self.forward_0(m)
        for m in range(2):
            self.backward_0(m)
            self.forward_0(m + 2)
        for m in range(2, 4):
            self.backward_0(m)
        self.update()
