"""Blocks of GPT that several devices have.

`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and
place, here the second of two of `drop` in one call, so that no cut changes them.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.model_blocks import Attention`
    from .runtime import Region
else:
    from runtime import Region


class Attention(Region):
    """Attention, such as `blocks.0.attention`, first in gpt.py:41."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 384)
        self.out = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        split = self.qkv(x).view(batch, 64, 3, 4, 32)  # gpt.py:41
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()  # gpt.py:42
        with self.seeded():
            mixed = F.scaled_dot_product_attention(
                q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True
            )  # gpt.py:44
        return self.out(mixed.transpose(1, 2).reshape(batch, 64, 128))  # gpt.py:45


class Block(Region):
    """Block, such as `blocks.0`, first in gpt.py:62."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(128)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(self.norm1(x))  # gpt.py:62
        with self.seeded("drop", 0, 2):
            x = x + self.drop(attention)
        with self.seeded("drop", 1, 2):
            return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))  # gpt.py:63
