"""A GPT that reads and writes bytes, trained on the Python standard library's own source text.

Its head shares the embedding's weight, and it drops out in four places: the two things that other
pipeline splitters get wrong.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 4
DIM = 128
HEADS = 4
SEQUENCE = 64  # bytes per row
VOCABULARY = 256  # every byte is a token
DROPOUT = 0.1
BATCH = 16  # rows per mini-batch
TEXT_BYTES = 2_000_000


class Attention(nn.Module):
    """Let each position look at itself and at those before it."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: (batch, sequence, dim) to the same shape."""
        rows, length, dim = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, dim // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, dim))


class Block(nn.Module):
    """Attention, then a two-layer network on each position; both read a normalised copy."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to the stream: (batch, sequence, dim) to the same shape."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Predict the next token at every position."""

    def __init__(
        self,
        blocks: int = BLOCKS,
        dim: int = DIM,
        heads: int = HEADS,
        sequence: int = SEQUENCE,
        vocabulary: int = VOCABULARY,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(sequence, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        # Small, so that the first predictions are about even: a loss near ln(vocabulary).
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.position.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, sequence, vocabulary) for tokens (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    """Build the default GPT."""
    return GPT()


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def example_batch() -> dict[str, Tensor]:
    """Return one mini-batch of real text."""
    return next(batches(seed=0))


def text() -> bytes:
    """Read the first two megabytes of the standard library's top-level modules, in name order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        try:
            found += path.read_bytes()
        except OSError:  # one file that cannot be read is no reason to stop
            continue
        if len(found) >= TEXT_BYTES:
            break
    if len(found) <= SEQUENCE + 1:
        raise FileNotFoundError(f"expected Python source files in {folder}, found {len(found)} B")
    return bytes(found[:TEXT_BYTES])


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield random windows of the text; the t-th batch depends on seed and t alone."""
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    window = torch.arange(SEQUENCE + 1)
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - SEQUENCE, (BATCH, 1), generator=dice)
        rows = data[starts + window].long()
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use AdamW, with weight decay on matrices and none on norms, biases and embeddings."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, param in named_params:
        embedding = name.startswith(("embed", "position", "head"))  # the head is the embedding
        free = embedding or "norm" in name or name.endswith("bias")
        (plain if free else decayed).append(param)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
