"""Device d1: stage 1 of 2 of EncoderDecoder.

    d0 --> [d1]      1f1b, 8 micro-batches of 2

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d1 import Stage1`
    from .model_blocks import Attention, FeedForward
    from .runtime import Channel, Device, Region, Stage, Tensors
else:
    from model_blocks import Attention, FeedForward
    from runtime import Channel, Device, Region, Stage, Tensors


class DecoderLayer(Region):
    """DecoderLayer, such as `decoder.1`, first in encdec.py:94."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.cross = Attention()
        self.mlp = FeedForward()
        self.norm1 = nn.LayerNorm(64)
        self.norm2 = nn.LayerNorm(64)
        self.norm3 = nn.LayerNorm(64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, cross_mask: Tensor) -> Tensor:
        read = self.norm1(x)  # encdec.py:94
        with self.seeded("drop", 0, 3):
            x = x + self.drop(self.attention(read, read, mask))  # encdec.py:95
        with self.seeded("drop", 1, 3):
            x = x + self.drop(self.cross(self.norm2(x), memory, cross_mask))  # encdec.py:96
        with self.seeded("drop", 2, 3):
            return x + self.drop(self.mlp(self.norm3(x)))  # encdec.py:97


class Stage1(Stage):
    """Stage 1, for device d1: decoder.0 to head."""

    returns = ("cross_entropy_loss",)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(
            [
                Tensors(
                    cross=Attention(),
                    mlp=FeedForward(),
                    norm2=nn.LayerNorm(64),
                    norm3=nn.LayerNorm(64),
                    drop=nn.Dropout(0.1),
                ),
                DecoderLayer(),
            ],
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 11)

    def forward(
        self, memory: Tensor, x: Tensor, drop: Tensor, source: Tensor, target: Tensor
    ) -> Tensor:
        written = target[:, :-1]  # encdec.py:122
        expected = target[:, 1:]
        source_mask = (source != 0).unsqueeze(1).unsqueeze(2)  # encdec.py:123
        written_mask = (written != 0).unsqueeze(1).unsqueeze(2) & torch.tril(
            torch.ones(17, 17, dtype=torch.bool, device=memory.device)
        )  # encdec.py:124
        x = x + drop  # encdec.py:95
        with self.seeded("decoder.0.drop", 1):
            drop = self.decoder[0].drop(
                self.decoder[0].cross(self.decoder[0].norm2(x), memory, source_mask)
            )  # encdec.py:96
        x = x + drop
        with self.seeded("decoder.0.drop", 2):
            # encdec.py:97
            x = x + self.decoder[0].drop(self.decoder[0].mlp(self.decoder[0].norm3(x)))
        x = self.decoder[1](x, memory, written_mask, source_mask)  # encdec.py:131
        logits = self.head(self.norm(x))  # encdec.py:132
        # encdec.py:133
        return F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=0)


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
MEMORY_FROM_0 = Channel(
    0, "activation", "layer_norm_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 16, 64), dtype=torch.float32, requires_grad=True,
)
X_FROM_0 = Channel(
    1, "activation", "add_5", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 17, 64), dtype=torch.float32, requires_grad=True,
)
DROP_FROM_0 = Channel(
    2, "activation", "dropout_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 17, 64), dtype=torch.float32, requires_grad=True,
)
MEMORY_GRAD_TO_0 = Channel(
    3, "gradient", "layer_norm_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 16, 64), dtype=torch.float32,
)
X_GRAD_TO_0 = Channel(
    4, "gradient", "add_5", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 17, 64), dtype=torch.float32,
)
DROP_GRAD_TO_0 = Channel(
    5, "gradient", "dropout_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 17, 64), dtype=torch.float32,
)


class DeviceD1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1")
    micro_batches = 8
    stages = {1: Stage1}
    loss = (1, "cross_entropy_loss")
    channels = (MEMORY_FROM_0, X_FROM_0, DROP_FROM_0, MEMORY_GRAD_TO_0, X_GRAD_TO_0, DROP_GRAD_TO_0)

    def forward_1(self, m: int) -> None:
        memory = self.recv(MEMORY_FROM_0, m)  # from d0
        x = self.recv(X_FROM_0, m)  # from d0
        drop = self.recv(DROP_FROM_0, m)  # from d0
        source = self.batch("source", m)
        target = self.batch("target", m)
        self.forward(1, m, memory=memory, x=x, drop=drop, source=source, target=target)

    def backward_1(self, m: int) -> None:
        memory_grad, x_grad, drop_grad = self.backward(1, m)
        self.send(MEMORY_GRAD_TO_0, m, memory_grad)  # to d0
        self.send(X_GRAD_TO_0, m, x_grad)  # to d0
        self.send(DROP_GRAD_TO_0, m, drop_grad)  # to d0

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(8):
            self.forward_1(m)
            self.backward_1(m)
        self.update()
