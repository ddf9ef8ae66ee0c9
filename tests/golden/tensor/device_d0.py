"""Device d0: stage 0 of 2 of GPT, TP rank 0 of 2.

    [d0]      1f1b, 4 micro-batches of 4

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .model_blocks import Block
    from .runtime import Channel, Device, Stage, all_reduce, copy_to_group
else:
    from model_blocks import Block
    from runtime import Channel, Device, Stage, all_reduce, copy_to_group


class Embedding(nn.Module):
    """Embedding, such as `embed`, first in gpt.py:93."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(128, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        embed = tokens  # gpt.py:93
        embed_2 = torch.logical_or(
            torch.logical_and(embed < 0, tokens >= 0), torch.logical_and(embed >= 128, tokens < 256)
        )
        return F.embedding(
            embed.masked_fill(embed_2, 0), self.weight
        ).masked_fill(embed_2.unsqueeze(-1), 0.0)


class Stage0(Stage):
    """Stage 0, for device d0: embed to head."""

    returns = ("div",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.position = nn.Embedding(64, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 128, bias=False)
        self.drop = nn.Dropout(0.1)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(64, device=tokens.device)  # gpt.py:92
        with self.seeded("drop"):
            # gpt.py:93
            x = self.drop(all_reduce(self.embed(tokens), self.group) + self.position(positions))
        for block in self.blocks:  # gpt.py:95
            x = block(x)
        flatten = self.head(copy_to_group(self.norm(x), self.group)).flatten(0, 1)  # gpt.py:106
        flatten_2 = targets.flatten()
        sub = flatten - all_reduce(flatten.detach().amax(dim=1, keepdim=True), self.group, "max")
        log = torch.log(all_reduce(torch.exp(sub).sum(dim=1), self.group))
        eq = flatten_2 == -100
        to = flatten_2
        logical_or = torch.logical_or(
            torch.logical_and(to < 0, flatten_2 >= 0), torch.logical_and(to >= 128, flatten_2 < 256)
        )
        logical_or = torch.logical_or(logical_or, eq)
        masked_fill = sub.gather(
            1, to.masked_fill(logical_or, 0).unsqueeze(1)
        ).squeeze(1).masked_fill(logical_or, 0.0)
        return (log - all_reduce(masked_fill, self.group)).masked_fill(
            eq, 0.0
        ).sum() / torch.logical_not(eq).sum()


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
# Exchanges of the tensor group's ranks: a channel for each size.
PARTS = (
    Channel(
        0, "part", "256 x float32", source=0, target=1, sender="d0", receiver="d1",
        shape=(256,), dtype=torch.float32, per_step=12,
    ),
    Channel(
        1, "part", "32768 x float32", source=0, target=1, sender="d0", receiver="d1",
        shape=(32768,), dtype=torch.float32, per_step=72,
    ),
    Channel(
        2, "part", "256 x float32", source=1, target=0, sender="d1", receiver="d0",
        shape=(256,), dtype=torch.float32, per_step=12,
    ),
    Channel(
        3, "part", "32768 x float32", source=1, target=0, sender="d1", receiver="d0",
        shape=(32768,), dtype=torch.float32, per_step=72,
    ),
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    members = ("d0", "d1")  # parts are added in this order
    stages = {0: Stage0}
    loss = (0, "div")
    channels = (*PARTS,)
    aliases = {"head.weight": "embed.weight"}

    def forward_0(self, m: int) -> None:
        tokens = self.batch("tokens", m)
        targets = self.batch("targets", m)
        self.forward(0, m, tokens=tokens, targets=targets)

    def backward_0(self, m: int) -> None:
        self.backward(0, m)

    def update(self) -> None:
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(4):
            self.forward_0(m)
            self.backward_0(m)
        self.update()
