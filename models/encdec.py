"""A Transformer with encoder and decoder (Vaswani et al., 2017); it learns to reverse a word.

Every decoder layer reads the encoder's output, and every layer reads a mask: padding in the encoder
and across, padding and order in the decoder. None of this fits a plain chain of stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = 2  # in the encoder, and as many in the decoder
DIM = 64
HEADS = 4
DROPOUT = 0.1
PAD, START, END = 0, 1, 2  # tokens; letters come after them
LETTERS = 8
VOCABULARY = 3 + LETTERS
LENGTH = 16  # letters of the longest word
BATCH = 16  # words per mini-batch


class Attention(nn.Module):
    """Let each position of `x` look at those positions of `memory` that the mask allows."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Mix (batch, t, dim) with (batch, s, dim); mask: true where t may see s."""
        q, k, v = self._heads(self.q(x)), self._heads(self.k(memory)), self._heads(self.v(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """A two-layer network on each position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, length, dim)."""
        return self.down(F.relu(self.up(x)))


class EncoderLayer(nn.Module):
    """Attention over the source, then the network."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.mlp = FeedForward(dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Keep the shape (batch, source length, dim)."""
        read = self.norm1(x)
        x = x + self.drop(self.attention(read, read, mask))
        return x + self.drop(self.mlp(self.norm2(x)))


class DecoderLayer(nn.Module):
    """Attention over what is written so far, attention over the source, then the network."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.cross = Attention(dim, heads)
        self.mlp = FeedForward(dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, cross_mask: Tensor) -> Tensor:
        """Keep the shape (batch, target length, dim); memory is (batch, source length, dim)."""
        read = self.norm1(x)
        x = x + self.drop(self.attention(read, read, mask))
        x = x + self.drop(self.cross(self.norm2(x), memory, cross_mask))
        return x + self.drop(self.mlp(self.norm3(x)))


class EncoderDecoder(nn.Module):
    """Write a word that depends on another."""

    def __init__(
        self, layers: int = LAYERS, dim: int = DIM, heads: int = HEADS, dropout: float = DROPOUT
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(LENGTH + 1, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, dropout) for _ in range(layers))
        self.memory_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the loss: the mean cross-entropy in nats over the target's letters and its end.

        Args:
            source: tokens (batch, length), padded.
            target: tokens (batch, length + 2): start, letters, end, padded.
        """
        written, expected = target[:, :-1], target[:, 1:]
        source_mask = (source != PAD)[:, None, None, :]
        written_mask = (written != PAD)[:, None, None, :] & _causal(written)
        memory = self._place(source)
        for layer in self.encoder:
            memory = layer(memory, source_mask)
        memory = self.memory_norm(memory)
        x = self._place(written)
        for layer in self.decoder:
            x = layer(x, memory, written_mask, source_mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=PAD)

    def _place(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.embed(tokens) + self.position(positions)


def _causal(tokens: Tensor) -> Tensor:
    """Return (length, length): row t is true at the positions up to t."""
    length = tokens.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()


def model() -> nn.Module:
    """Build the default encoder-decoder."""
    return EncoderDecoder()


def example_batch() -> dict[str, Tensor]:
    """Return one mini-batch of words and their reverses."""
    return next(batches(seed=0))


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield words and their reverses; the t-th batch depends on seed and t alone."""
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        source = torch.full((BATCH, LENGTH), PAD)
        target = torch.full((BATCH, LENGTH + 2), PAD)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), generator=dice)
        for row, length in enumerate(lengths.tolist()):
            word = torch.randint(3, VOCABULARY, (length,), generator=dice)
            source[row, :length] = word
            target[row, 0] = START
            target[row, 1 : length + 1] = word.flip(0)
            target[row, length + 1] = END
        yield {"source": source, "target": target}


def lr_scale(step: int) -> float:
    """Rise over the first four steps; torch's default AdamW does the rest."""
    return min(1.0, (step + 1) / 4)
