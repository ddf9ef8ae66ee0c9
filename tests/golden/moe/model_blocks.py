"""Blocks of MoE that several devices have.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixture(nn.Module):
    """Mixture, such as `blocks.0.mixture`, first in moe.py:45."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(4, 64, 128))
        self.down = nn.Parameter(torch.empty(4, 128, 64))
        self.router = nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        likes = F.softmax(self.router(x), dim=-1)  # moe.py:45
        weight, choice = torch.topk(likes, 2)  # moe.py:57
        weight = weight / weight.sum(dim=-1, keepdim=True)  # moe.py:58
        chosen = F.one_hot(choice, 4)  # moe.py:59
        batch = x.size(0)
        queue = torch.cumsum(chosen.transpose(1, 2).reshape(batch, -1, 4), dim=1) - 1  # moe.py:61
        queue = queue.view(batch, 2, 32, 4).transpose(1, 2)  # moe.py:62
        place = queue.unsqueeze(4) == torch.arange(20, device=x.device)  # moe.py:63
        seat = place.float() * chosen.unsqueeze(4).float()  # moe.py:64
        combine = (weight.unsqueeze(3).unsqueeze(4) * seat).sum(dim=2)  # moe.py:65
        dispatch = (combine > 0).float()  # moe.py:47
        taken = torch.einsum("btec,btd->becd", dispatch, x)  # moe.py:48
        hidden = F.gelu(torch.einsum("becd,edh->bech", taken, self.up))  # moe.py:49
        given = torch.einsum("bech,ehd->becd", hidden, self.down)  # moe.py:50
        y = torch.einsum("btec,becd->btd", combine, given)  # moe.py:51
        share = F.one_hot(likes.argmax(dim=-1), 4).float().mean(dim=(0, 1))  # moe.py:69
        imbalance = (share * likes.mean(dim=(0, 1))).sum() * 4  # moe.py:70
        return y, imbalance


class Block(nn.Module):
    """Block, such as `blocks.0`, first in moe.py:87."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)
        self.norm2 = nn.LayerNorm(64)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chunk, chunk_2, chunk_3 = self.qkv(self.norm1(x)).chunk(3, dim=-1)  # moe.py:87
        q = chunk.unflatten(-1, (4, -1)).transpose(1, 2)  # moe.py:94
        k = chunk_2.unflatten(-1, (4, -1)).transpose(1, 2)
        v = chunk_3.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # moe.py:88
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # moe.py:89
        y, imbalance = self.mixture(self.norm2(x))  # moe.py:90
        x = x + y  # moe.py:91
        return x, imbalance
