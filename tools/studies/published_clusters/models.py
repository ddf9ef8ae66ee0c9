"""The models that were measured on clusters, as their authors describe them; needs torch.

`graph_of` captures each once, on the meta device. Shapes matter here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend import capture

# --------------------------------------------------------------------------- Megatron-DeepSpeed


class _GptBlock(nn.Module):
    """Megatron's block in float32: no fused softmax there, and Sailor trains without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and feed-forward."""
        rows, length, width = x.shape
        each = width // self.heads
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (p.view(rows, length, self.heads, each).transpose(1, 2) for p in parts)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1) * each**-0.5).masked_fill(mask, -10000.0)
        mixed = scores.softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        added: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return added


class Gpt(nn.Module):
    """Layer 0: the embedding; 1 to `layers`: blocks; the last: norm and head."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# --------------------------------------------------------------------------- Llama


@dataclass(frozen=True)
class LlamaShape:
    """Settings of a configuration file."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int


class _LlamaBlock(nn.Module):
    """RMS norms, grouped queries, rotary positions, flash attention, SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape, self.each = shape, shape.width // shape.heads
        width, narrow = shape.width, shape.kv_heads * self.each
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and feed-forward."""
        rows, length, width = x.shape
        y, shared = self.norm_1(x), self.shape.heads != self.shape.kv_heads
        q, k, v = (
            p(y).view(rows, length, -1, self.each).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.norm_2(x)
        added: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return added


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Embedding, blocks, norm, head; no weight is tied."""

    def __init__(self, shape: LlamaShape, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        each = shape.width // shape.heads
        self.register_buffer("cos", torch.zeros(length, each))
        self.register_buffer("sin", torch.zeros(length, each))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


# --------------------------------------------------------------------------- by name

LLAMAS: Mapping[str, tuple[LlamaShape, int]] = {
    "Llama-3.1-8B": (LlamaShape(4096, 32, 32, 8, 14336, 128256), 8192),
    "Llama-1B": (LlamaShape(2048, 16, 32, 8, 8192, 128256), 4096),
    "TinyLlama-1.1B": (LlamaShape(2048, 22, 32, 4, 5632, 32000), 2048),
    "Llama-2-7B": (LlamaShape(4096, 32, 32, 32, 11008, 32000), 4096),
}
"""Shapes and rows' lengths: the models' cards; of nanotron's 1B, Llama-3.2's."""
GPTS: Mapping[str, tuple[int, int, int, int, int]] = {
    "OPT-350M": (1024, 16, 24, 50272, 2048),
    "GPT-Neo-2.7B": (2560, 20, 32, 50257, 2048),
}
"""Width, heads, blocks, vocabulary, length: Sailor's training_config_*.json. They ran in float32,
products in TF32: its ds_config.json names no half precision."""


def built(name: str) -> tuple[nn.Module, int]:
    """Return a model, and a row's length; Llamas compute in bfloat16, as FSDP and nanotron do."""
    if name in GPTS:
        return Gpt(*GPTS[name]), GPTS[name][-1]
    shape, length = LLAMAS[name]
    return Llama(shape, length).bfloat16(), length


@cache
def graph_of(name: str) -> Graph:
    """Capture a model."""
    with torch.device("meta"):
        model, length = built(name)
    batch = {key: torch.zeros(2, length, dtype=torch.long) for key in ("tokens", "y")}
    loss_of = _token_loss
    return capture(model, batch, loss_of, training=True, name=name, loss_needed=False).graph


def _token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
