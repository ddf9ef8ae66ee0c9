"""A Llama: rotary positions, RMSNorm, grouped heads, SwiGLU; it learns to add digits.

Every block reads the same two rotary tables, which are computed once, without gradient, at the top:
a splitter must either send them to every stage or compute them again there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 4
DIM = 64
HEADS = 4  # of queries
KV_HEADS = 2  # of keys and values; each serves HEADS / KV_HEADS query heads
HIDDEN = 172  # width of the feed-forward network, about 8/3 of DIM
ALPHABET = "0123456789+=\n"
SUMS = 9  # "7+5=12\n" per row
BATCH = 16  # rows per mini-batch
WARMUP = 5  # steps

clip_norm = 1.0


class Output(NamedTuple):
    """What the model returns: the mean cross-entropy in nats, and the logits it came from."""

    loss: Tensor
    logits: Tensor


class RMSNorm(nn.Module):
    """Scale each position to a root mean square of one."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Tables that turn pairs of channels by an angle that grows with the position (RoFormer)."""

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @torch.no_grad()
    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (length, head_dim)."""
        positions = torch.arange(length, device=self.frequencies.device)
        angles = torch.outer(positions.float(), self.frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channels i and i + head_dim / 2 as a pair; x is (batch, heads, length, head_dim)."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # angles are made in float32
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which several query heads share one head of keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.sharing = heads // kv_heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix positions: (batch, length, dim) to the same shape."""
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.sharing, dim=1)
        v = v.repeat_interleave(self.sharing, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """A gated network on each position (SwiGLU)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, length, dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then the gated network; both read a normalised copy."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = FeedForward(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add both parts to the stream: (batch, length, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Predict the next token.

    The 7 B size is `Llama(32, 4096, 32, 32, 11008, 32000)`; on a laptop, under the meta device.
    """

    def __init__(
        self,
        blocks: int = BLOCKS,
        dim: int = DIM,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        hidden: int = HIDDEN,
        vocabulary: int = len(ALPHABET),
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.rotary = Rotary(dim // heads)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(blocks))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Output:
        """Return loss and logits (batch, length, vocabulary); both inputs are (batch, length)."""
        x = self.embed(tokens)
        cos, sin = self.rotary(tokens.shape[1])
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return Output(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


def model() -> nn.Module:
    """Build the default Llama."""
    return Llama()


def example_batch() -> dict[str, Tensor]:
    """Return one mini-batch of sums."""
    return next(batches(seed=0))


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield rows of sums written out; the t-th batch depends on seed and t alone."""
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        pairs = torch.randint(10, (BATCH, SUMS, 2), generator=dice).tolist()
        lines = ["".join(f"{a}+{b}={a + b:02}\n" for a, b in row) for row in pairs]
        rows = torch.tensor([[ALPHABET.index(letter) for letter in line] for line in lines])
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use AdamW on everything alike."""
    return torch.optim.AdamW(named_params, lr=1e-2, betas=(0.9, 0.95))


def lr_scale(step: int) -> float:
    """Rise to the full learning rate over the first steps."""
    return min(1.0, (step + 1) / WARMUP)
