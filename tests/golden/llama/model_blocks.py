"""Blocks of Llama that several devices have.

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotary, such as `rotary`, first in llama.py:63."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(8))

    def forward(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():  # llama.py:63
            positions = torch.arange(62, device=self.frequencies.device)
            angles = torch.outer(positions.float(), self.frequencies)  # llama.py:64
            angles = torch.cat([angles, angles], dim=-1)  # llama.py:65
            cos = torch.cos(angles)  # llama.py:66
            sin = torch.sin(angles)
        return cos, sin


class RMSNorm(nn.Module):
    """RMSNorm, such as `blocks.0.attention_norm`, first in llama.py:47."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64))

    def forward(self, x: Tensor) -> Tensor:
        # llama.py:47
        return x * torch.rsqrt((x ** 2).mean(dim=-1, keepdim=True) + 1e-05) * self.weight


class Attention(nn.Module):
    """Attention, such as `blocks.0.attention`, first in llama.py:90."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64, bias=False)
        self.k = nn.Linear(64, 32, bias=False)
        self.v = nn.Linear(64, 32, bias=False)
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 16)).transpose(1, 2)  # llama.py:98
        k = self.k(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        left, right = q.chunk(2, dim=-1)  # llama.py:71
        q = q * cos + torch.cat([-right, left], dim=-1) * sin  # llama.py:73
        left, right = k.chunk(2, dim=-1)  # llama.py:71
        k = k * cos + torch.cat([-right, left], dim=-1) * sin  # llama.py:73
        k = k.repeat_interleave(2, dim=1)  # llama.py:92
        v = v.repeat_interleave(2, dim=1)  # llama.py:93
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # llama.py:94
        return self.out(mixed.transpose(1, 2).flatten(2))  # llama.py:95


class FeedForward(nn.Module):
    """FeedForward, such as `blocks.0.mlp`, first in llama.py:112."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 172, bias=False)
        self.up = nn.Linear(64, 172, bias=False)
        self.down = nn.Linear(172, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # llama.py:112


class Block(nn.Module):
    """Block, such as `blocks.0`, first in llama.py:47."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm()
        self.attention = Attention()
        self.mlp_norm = RMSNorm()
        self.mlp = FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)  # llama.py:127
        return x + self.mlp(self.mlp_norm(x))  # llama.py:128
