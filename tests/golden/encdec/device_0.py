"""Device d0: stage 0 of 2 of EncoderDecoder.

    [d0] --> d1      1f1b, 8 micro-batches of 2

Written by bigbrain-fx; needs torch only.
"""

import torch
import torch.nn.functional as F

if __package__:  # imported as part of a package: `from bundle.device_0 import Stage0`
    from .runtime import Channel, Device, Region, Stage, Tensors
else:
    from runtime import Channel, Device, Region, Stage, Tensors


class EncoderLayer(Region):
    """EncoderLayer, such as `encoder.0` of the model, first in encdec.py:74."""

    def __init__(self):
        super().__init__(
            norm1=Tensors(weight=(64,), bias=(64,)),
            attention=Tensors(
                q=Tensors(weight=(64, 64), bias=(64,)),
                k=Tensors(weight=(64, 64), bias=(64,)),
                v=Tensors(weight=(64, 64), bias=(64,)),
                out=Tensors(weight=(64, 64), bias=(64,)),
            ),
            norm2=Tensors(weight=(64,), bias=(64,)),
            mlp=Tensors(
                up=Tensors(weight=(256, 64), bias=(256,)),
                down=Tensors(weight=(64, 256), bias=(64,)),
            ),
        )

    def forward(self, add, source_mask):
        read = F.layer_norm(add, (64,), self.norm1.weight, self.norm1.bias)  # encdec.py:74
        q = F.linear(read, self.attention.q.weight, self.attention.q.bias)  # encdec.py:40
        transpose = q.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        k = F.linear(read, self.attention.k.weight, self.attention.k.bias)  # encdec.py:40
        transpose_2 = k.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        v = F.linear(read, self.attention.v.weight, self.attention.v.bias)  # encdec.py:40
        transpose_3 = v.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        mixed = F.scaled_dot_product_attention(
            transpose, transpose_2, transpose_3, attn_mask=source_mask
        )  # encdec.py:41
        out = F.linear(
            mixed.transpose(1, 2).flatten(2), self.attention.out.weight, self.attention.out.bias
        )  # encdec.py:42
        with self.key("drop", 0, 2):
            drop = F.dropout(out, 0.1)  # encdec.py:75
        x = add + drop
        norm2 = F.layer_norm(x, (64,), self.norm2.weight, self.norm2.bias)  # encdec.py:76
        down = F.linear(
            F.relu(F.linear(norm2, self.mlp.up.weight, self.mlp.up.bias)),
            self.mlp.down.weight,
            self.mlp.down.bias,
        )  # encdec.py:58
        with self.key("drop", 1, 2):
            drop = F.dropout(down, 0.1)  # encdec.py:76
        return x + drop


class Attention(Region):
    """Attention, such as `encoder.0.attention` of the model, first in encdec.py:40."""

    def __init__(self):
        super().__init__(
            q=Tensors(weight=(64, 64), bias=(64,)),
            k=Tensors(weight=(64, 64), bias=(64,)),
            v=Tensors(weight=(64, 64), bias=(64,)),
            out=Tensors(weight=(64, 64), bias=(64,)),
        )

    def forward(self, read, source_mask):
        q = F.linear(read, self.q.weight, self.q.bias)  # encdec.py:40
        transpose = q.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        k = F.linear(read, self.k.weight, self.k.bias)  # encdec.py:40
        transpose_2 = k.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        v = F.linear(read, self.v.weight, self.v.bias)  # encdec.py:40
        transpose_3 = v.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        mixed = F.scaled_dot_product_attention(
            transpose, transpose_2, transpose_3, attn_mask=source_mask
        )  # encdec.py:41
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out.weight, self.out.bias)  # encdec.py:42


class Stage0(Stage):
    """Stage 0, for device d0: embed to decoder.0."""

    returns = ("memory", "add", "drop")

    def __init__(self):
        super().__init__(
            embed=Tensors(weight=(11, 64)),
            position=Tensors(weight=(17, 64)),
            encoder=Tensors({i: EncoderLayer() for i in range(2)}),
            memory_norm=Tensors(weight=(64,), bias=(64,)),
            decoder=Tensors(
                {0: Tensors(attention=Attention(), norm1=Tensors(weight=(64,), bias=(64,)))}
            ),
        )

    def forward(self, source, target):
        slice_ = target[:, :-1]  # encdec.py:122
        source_mask = (source != 0).unsqueeze(1).unsqueeze(2)  # encdec.py:123
        unsqueeze = (slice_ != 0).unsqueeze(1).unsqueeze(2)  # encdec.py:124
        tril = torch.tril(torch.ones(17, 17, dtype=torch.bool, device=source.device))  # encdec.py:143
        written_mask = unsqueeze & tril  # encdec.py:124
        arange = torch.arange(16, device=source.device)  # encdec.py:136
        add = F.embedding(source, self.embed.weight) + F.embedding(arange, self.position.weight)  # encdec.py:137
        for block in self.encoder.children():
            add = block(add, source_mask)
        memory = F.layer_norm(add, (64,), self.memory_norm.weight, self.memory_norm.bias)  # encdec.py:128
        positions = torch.arange(17, device=source.device)  # encdec.py:136
        add = F.embedding(slice_, self.embed.weight) + F.embedding(positions, self.position.weight)  # encdec.py:137
        read = F.layer_norm(add, (64,), self.decoder[0].norm1.weight, self.decoder[0].norm1.bias)  # encdec.py:94
        out = self.decoder[0].attention(read, written_mask)
        with self.key("decoder.0.drop"):
            drop = F.dropout(out, 0.1)  # encdec.py:95
        return (memory, add, drop)


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
MEMORY_TO_1 = Channel(
    0,
    "activation",
    "layer_norm_4",
    0,
    1,
    "d0",
    "d1",
    (2, 16, 64),
    torch.float32,
    requires_grad=True,
)
ADD_TO_1 = Channel(
    1, "activation", "add_5", 0, 1, "d0", "d1", (2, 17, 64), torch.float32, requires_grad=True
)
DROP_TO_1 = Channel(
    2, "activation", "dropout_4", 0, 1, "d0", "d1", (2, 17, 64), torch.float32, requires_grad=True
)
MEMORY_GRAD_FROM_1 = Channel(
    3, "gradient", "layer_norm_4", 1, 0, "d1", "d0", (2, 16, 64), torch.float32
)
ADD_GRAD_FROM_1 = Channel(4, "gradient", "add_5", 1, 0, "d1", "d0", (2, 17, 64), torch.float32)
DROP_GRAD_FROM_1 = Channel(5, "gradient", "dropout_4", 1, 0, "d1", "d0", (2, 17, 64), torch.float32)


class Device0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 8
    stages = {0: Stage0}
    channels = (
        MEMORY_TO_1, ADD_TO_1, DROP_TO_1, MEMORY_GRAD_FROM_1, ADD_GRAD_FROM_1, DROP_GRAD_FROM_1
    )

    def forward_0(self, m):
        source = self.batch("source", m)
        target = self.batch("target", m)
        memory, add, drop = self.forward(0, m, source=source, target=target)
        self.send(MEMORY_TO_1, m, memory)  # to d1
        self.send(ADD_TO_1, m, add)  # to d1
        self.send(DROP_TO_1, m, drop)  # to d1

    def backward_0(self, m):
        memory_grad = self.recv(MEMORY_GRAD_FROM_1, m)  # from d1
        add_grad = self.recv(ADD_GRAD_FROM_1, m)  # from d1
        drop_grad = self.recv(DROP_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, memory=memory_grad, add=add_grad, drop=drop_grad)

    def update(self):
        self.optimizer_step()

    def step_once(self):
        for m in range(2):
            self.forward_0(m)
        for m in range(6):
            self.backward_0(m)
            self.forward_0(m + 2)
        for m in range(6, 8):
            self.backward_0(m)
        self.update()
