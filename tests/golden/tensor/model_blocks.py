"""Blocks of GPT that several devices have.

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.model_blocks import Attention`
    from .runtime import Region, Tensors, all_reduce, copy_to_group, own_part
else:
    from runtime import Region, Tensors, all_reduce, copy_to_group, own_part


class Attention(Region):
    """Attention, such as `blocks.0.attention`, first in gpt.py:41."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 192)
        self.out = Tensors(weight=(128, 64), bias=(128,))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        split = self.qkv(copy_to_group(x, self.group)).view(batch, 64, 3, 2, 32)  # gpt.py:41
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()  # gpt.py:42
        masked_fill = (q @ k.transpose(-2, -1) * 0.1767766952966369).masked_fill(
            torch.triu(torch.ones(64, 64, dtype=torch.bool, device=x.device), 1), float("-inf")
        )  # gpt.py:44
        with self.seeded():
            dropout = F.dropout(
                torch.ones(x.size(0), 4, 64, 64, dtype=torch.float32, device=x.device),
                0.1,
                training=self.training,
            )
        split_result = own_part(dropout, self.group, 1, 1, (2, 2))
        softmax = F.softmax(masked_fill, dim=-1)
        mixed = softmax * split_result @ v
        all_reduce_result = all_reduce(
            F.linear(mixed.transpose(1, 2).reshape(batch, 64, 64), self.out.weight), self.group
        )  # gpt.py:45
        return all_reduce_result + self.out.bias


class Block(Region):
    """Block, such as `blocks.0`, first in gpt.py:62."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(128)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(128)
        self.up = nn.Linear(128, 256)
        self.down = Tensors(weight=(128, 256), bias=(128,))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(self.norm1(x))  # gpt.py:62
        with self.seeded("drop", 0, 2):
            x = x + self.drop(attention)
        all_reduce_result = all_reduce(
            F.linear(F.gelu(self.up(copy_to_group(self.norm2(x), self.group))), self.down.weight),
            self.group,
        )  # gpt.py:63
        with self.seeded("drop", 1, 2):
            return x + self.drop(all_reduce_result + self.down.bias)
