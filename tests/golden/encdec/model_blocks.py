"""Blocks of EncoderDecoder that several devices have.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention, such as `decoder.0.cross`, first in encdec.py:40."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64)
        self.k = nn.Linear(64, 64)
        self.v = nn.Linear(64, 64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)  # encdec.py:45
        k = self.k(memory).unflatten(-1, (4, -1)).transpose(1, 2)
        v = self.v(memory).unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # encdec.py:41
        return self.out(mixed.transpose(1, 2).flatten(2))  # encdec.py:42


class FeedForward(nn.Module):
    """FeedForward, such as `encoder.0.mlp`, first in encdec.py:58."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))  # encdec.py:58
