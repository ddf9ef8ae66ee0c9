"""Device d0: stage 0 of 2 of EncoderDecoder.

    [d0] --> d1      1f1b, 8 micro-batches of 2

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .model_blocks import Attention, FeedForward
    from .runtime import Channel, Device, Region, Stage, Tensors
else:
    from model_blocks import Attention, FeedForward
    from runtime import Channel, Device, Region, Stage, Tensors


class EncoderLayer(Region):
    """EncoderLayer, such as `encoder.0`, first in encdec.py:74."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = FeedForward()
        self.norm1 = nn.LayerNorm(64)
        self.norm2 = nn.LayerNorm(64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        read = self.norm1(x)  # encdec.py:74
        with self.seeded("drop", 0, 2):
            x = x + self.drop(self.attention(read, read, mask))  # encdec.py:75
        with self.seeded("drop", 1, 2):
            return x + self.drop(self.mlp(self.norm2(x)))  # encdec.py:76


class Stage0(Stage):
    """Stage 0, for device d0: embed to decoder.0."""

    returns = ("memory", "x", "drop")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.position = nn.Embedding(17, 64)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.memory_norm = nn.LayerNorm(64)
        self.decoder = nn.ModuleList(
            [Tensors(attention=Attention(), norm1=nn.LayerNorm(64), drop=nn.Dropout(0.1))]
        )

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        written = target[:, :-1]  # encdec.py:122
        source_mask = (source != 0).unsqueeze(1).unsqueeze(2)  # encdec.py:123
        written_mask = (written != 0).unsqueeze(1).unsqueeze(2) & torch.tril(
            torch.ones(17, 17, dtype=torch.bool, device=source.device)
        )  # encdec.py:124
        positions = torch.arange(16, device=source.device)  # encdec.py:136
        memory = self.embed(source) + self.position(positions)  # encdec.py:137
        for block in self.encoder:  # encdec.py:127
            memory = block(memory, source_mask)
        memory = self.memory_norm(memory)  # encdec.py:128
        positions = torch.arange(17, device=source.device)  # encdec.py:136
        x = self.embed(written) + self.position(positions)  # encdec.py:137
        read = self.decoder[0].norm1(x)  # encdec.py:94
        with self.seeded("decoder.0.drop"):
            # encdec.py:95
            drop = self.decoder[0].drop(self.decoder[0].attention(read, read, written_mask))
        return memory, x, drop


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
MEMORY_TO_1 = Channel(
    0, "activation", "layer_norm_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 16, 64), dtype=torch.float32, requires_grad=True,
)
X_TO_1 = Channel(
    1, "activation", "add_5", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 17, 64), dtype=torch.float32, requires_grad=True,
)
DROP_TO_1 = Channel(
    2, "activation", "dropout_4", source=0, target=1, sender="d0", receiver="d1",
    shape=(2, 17, 64), dtype=torch.float32, requires_grad=True,
)
MEMORY_GRAD_FROM_1 = Channel(
    3, "gradient", "layer_norm_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 16, 64), dtype=torch.float32,
)
X_GRAD_FROM_1 = Channel(
    4, "gradient", "add_5", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 17, 64), dtype=torch.float32,
)
DROP_GRAD_FROM_1 = Channel(
    5, "gradient", "dropout_4", source=1, target=0, sender="d1", receiver="d0",
    shape=(2, 17, 64), dtype=torch.float32,
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 8
    stages = {0: Stage0}
    channels = (MEMORY_TO_1, X_TO_1, DROP_TO_1, MEMORY_GRAD_FROM_1, X_GRAD_FROM_1, DROP_GRAD_FROM_1)

    def forward_0(self, m: int) -> None:
        source = self.batch("source", m)
        target = self.batch("target", m)
        memory, x, drop = self.forward(0, m, source=source, target=target)
        self.send(MEMORY_TO_1, m, memory)  # to d1
        self.send(X_TO_1, m, x)  # to d1
        self.send(DROP_TO_1, m, drop)  # to d1

    def backward_0(self, m: int) -> None:
        memory_grad = self.recv(MEMORY_GRAD_FROM_1, m)  # from d1
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        drop_grad = self.recv(DROP_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, memory=memory_grad, x=x_grad, drop=drop_grad)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_0(m)
        for m in range(6):
            self.backward_0(m)
            self.forward_0(m + 2)
        for m in range(6, 8):
            self.backward_0(m)
        self.update()
