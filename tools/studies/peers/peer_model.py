"""The model of `bench_peer.py`: an 8-block GPT, untied and without dropout.

Untied, because torch.distributed.pipelining trains a tied weight apart; without dropout, because
only then can two programs be expected to find the same gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# `tools.studies.peers` takes a smaller one
BLOCKS = int(os.environ.get("PEER_BLOCKS", "8"))
DIM = int(os.environ.get("PEER_DIM", "512"))
HEADS = 8
SEQUENCE = 128
VOCABULARY = 2048
BATCH = 8


class Attention(nn.Module):
    """Let each position look at itself and at those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: (batch, sequence, dim) to the same shape."""
        rows, length, dim = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, dim))
        return out


class Block(nn.Module):
    """Attention, then a two-layer network on each position; both read a normalised copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to the stream: (batch, sequence, dim) to the same shape."""
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Predict the next token at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Embedding(SEQUENCE, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, sequence, vocabulary) for tokens (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model() -> nn.Module:
    """Build the model."""
    return GPT()


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next token, in nats."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def example_batch() -> dict[str, Tensor]:
    """Return one mini-batch."""
    return next(batches(0))


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield random tokens, and the ones after them as targets."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        row = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=dice)
        yield {"tokens": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()}


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use AdamW as it comes, with a small step."""
    return torch.optim.AdamW([parameter for _, parameter in named_params], lr=1e-4)
