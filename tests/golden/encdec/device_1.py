"""Device d1: stage 1 of 2 of EncoderDecoder.

    d0 --> [d1]      1f1b, 8 micro-batches of 2

Written by bigbrain-fx; needs torch only.
"""

import torch
import torch.nn.functional as F

if __package__:  # imported as part of a package: `from bundle.device_0 import Stage0`
    from .runtime import Channel, Device, Region, Stage, Tensors
else:
    from runtime import Channel, Device, Region, Stage, Tensors


class Attention_2(Region):
    """Attention, such as `decoder.0.cross` of the model, first in encdec.py:40."""

    def __init__(self):
        super().__init__(
            q=Tensors(weight=(64, 64), bias=(64,)),
            k=Tensors(weight=(64, 64), bias=(64,)),
            v=Tensors(weight=(64, 64), bias=(64,)),
            out=Tensors(weight=(64, 64), bias=(64,)),
        )

    def forward(self, norm2, memory, source_mask):
        q = F.linear(norm2, self.q.weight, self.q.bias)  # encdec.py:40
        transpose = q.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        k = F.linear(memory, self.k.weight, self.k.bias)  # encdec.py:40
        transpose_2 = k.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        v = F.linear(memory, self.v.weight, self.v.bias)  # encdec.py:40
        transpose_3 = v.unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        mixed = F.scaled_dot_product_attention(
            transpose, transpose_2, transpose_3, attn_mask=source_mask
        )  # encdec.py:41
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out.weight, self.out.bias)  # encdec.py:42


class FeedForward(Region):
    """FeedForward, such as `encoder.0.mlp` of the model, first in encdec.py:58."""

    def __init__(self):
        super().__init__(
            up=Tensors(weight=(256, 64), bias=(256,)), down=Tensors(weight=(64, 256), bias=(64,))
        )

    def forward(self, norm2):
        down = F.linear(
            F.relu(F.linear(norm2, self.up.weight, self.up.bias)), self.down.weight, self.down.bias
        )  # encdec.py:58
        return down


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


class Stage1(Stage):
    """Stage 1, for device d1: decoder.0 to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self):
        super().__init__(
            decoder=Tensors(
                {
                    0: Tensors(
                        cross=Attention_2(),
                        mlp=FeedForward(),
                        norm2=Tensors(weight=(64,), bias=(64,)),
                        norm3=Tensors(weight=(64,), bias=(64,)),
                    ),
                    1: Tensors(
                        attention=Attention(),
                        cross=Attention_2(),
                        mlp=FeedForward(),
                        norm1=Tensors(weight=(64,), bias=(64,)),
                        norm2=Tensors(weight=(64,), bias=(64,)),
                        norm3=Tensors(weight=(64,), bias=(64,)),
                    ),
                },
            ),
            norm=Tensors(weight=(64,), bias=(64,)),
            head=Tensors(weight=(11, 64), bias=(11,)),
        )

    def forward(self, memory, add, drop, source, target):
        slice_ = target[:, :-1]  # encdec.py:122
        slice__2 = target[:, 1:]
        source_mask = (source != 0).unsqueeze(1).unsqueeze(2)  # encdec.py:123
        unsqueeze = (slice_ != 0).unsqueeze(1).unsqueeze(2)  # encdec.py:124
        tril = torch.tril(torch.ones(17, 17, dtype=torch.bool, device=memory.device))  # encdec.py:143
        written_mask = unsqueeze & tril  # encdec.py:124
        x = add + drop  # encdec.py:95
        norm2 = F.layer_norm(x, (64,), self.decoder[0].norm2.weight, self.decoder[0].norm2.bias)  # encdec.py:96
        out = self.decoder[0].cross(norm2, memory, source_mask)
        with self.key("decoder.0.drop", 1):
            drop = F.dropout(out, 0.1)
        x = x + drop
        norm3 = F.layer_norm(x, (64,), self.decoder[0].norm3.weight, self.decoder[0].norm3.bias)  # encdec.py:97
        down = self.decoder[0].mlp(norm3)
        with self.key("decoder.0.drop", 2):
            drop = F.dropout(down, 0.1)
        add = x + drop
        read = F.layer_norm(add, (64,), self.decoder[1].norm1.weight, self.decoder[1].norm1.bias)  # encdec.py:94
        out = self.decoder[1].attention(read, written_mask)
        with self.key("decoder.1.drop"):
            drop = F.dropout(out, 0.1)  # encdec.py:95
        x = add + drop
        norm2 = F.layer_norm(x, (64,), self.decoder[1].norm2.weight, self.decoder[1].norm2.bias)  # encdec.py:96
        out = self.decoder[1].cross(norm2, memory, source_mask)
        with self.key("decoder.1.drop", 1):
            drop = F.dropout(out, 0.1)
        x = x + drop
        norm3 = F.layer_norm(x, (64,), self.decoder[1].norm3.weight, self.decoder[1].norm3.bias)  # encdec.py:97
        down = self.decoder[1].mlp(norm3)
        with self.key("decoder.1.drop", 2):
            drop = F.dropout(down, 0.1)
        add = x + drop
        logits = F.linear(
            F.layer_norm(add, (64,), self.norm.weight, self.norm.bias),
            self.head.weight,
            self.head.bias,
        )  # encdec.py:132
        cross_entropy_loss = F.cross_entropy(
            logits.flatten(0, 1), slice__2.flatten(), ignore_index=0
        )  # encdec.py:133
        return cross_entropy_loss


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
MEMORY_FROM_0 = Channel(
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
ADD_FROM_0 = Channel(
    1, "activation", "add_5", 0, 1, "d0", "d1", (2, 17, 64), torch.float32, requires_grad=True
)
DROP_FROM_0 = Channel(
    2, "activation", "dropout_4", 0, 1, "d0", "d1", (2, 17, 64), torch.float32, requires_grad=True
)
MEMORY_GRAD_TO_0 = Channel(
    3, "gradient", "layer_norm_4", 1, 0, "d1", "d0", (2, 16, 64), torch.float32
)
ADD_GRAD_TO_0 = Channel(4, "gradient", "add_5", 1, 0, "d1", "d0", (2, 17, 64), torch.float32)
DROP_GRAD_TO_0 = Channel(5, "gradient", "dropout_4", 1, 0, "d1", "d0", (2, 17, 64), torch.float32)


class Device1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 8
    stages = {1: Stage1}
    loss = (1, "cross_entropy_loss")
    channels = (
        MEMORY_FROM_0, ADD_FROM_0, DROP_FROM_0, MEMORY_GRAD_TO_0, ADD_GRAD_TO_0, DROP_GRAD_TO_0
    )

    def forward_1(self, m):
        memory = self.recv(MEMORY_FROM_0, m)  # from d0
        add = self.recv(ADD_FROM_0, m)  # from d0
        drop = self.recv(DROP_FROM_0, m)  # from d0
        source = self.batch("source", m)
        target = self.batch("target", m)
        self.forward(1, m, memory=memory, add=add, drop=drop, source=source, target=target)

    def backward_1(self, m):
        memory_grad, add_grad, drop_grad = self.backward(1, m)
        self.send(MEMORY_GRAD_TO_0, m, memory_grad)  # to d0
        self.send(ADD_GRAD_TO_0, m, add_grad)  # to d0
        self.send(DROP_GRAD_TO_0, m, drop_grad)  # to d0

    def update(self):
        self.optimizer_step()

    def step_once(self):
        for m in range(8):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
