"""A Transformer whose feed-forward networks are mixtures of experts; it learns to count.

Routing is GShard's (Lepikhin et al., 2020, algorithm 1), as products with one-hot tensors: an
expert takes a fixed number of positions per row, so no shape depends on the data. Choices beyond it
are dropped. Differences: one row is one group, and no second choice is dropped at random.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 3
DIM = 64
HEADS = 4
HIDDEN = 128  # width of one expert
EXPERTS = 4
CHOICES = 2  # experts that a position is sent to
SLACK = 1.25  # places per expert, over what an even split would need
BALANCE = 0.01  # weight of the load-balance loss
VOCABULARY = 32
STRIDES = (1, 3, 5, 7)
SEQUENCE = 32
BATCH = 16  # rows per mini-batch


class Mixture(nn.Module):
    """Send each position to the experts that the router likes best."""

    def __init__(self, dim: int, hidden: int, experts: int, choices: int) -> None:
        super().__init__()
        self.experts = experts
        self.choices = choices
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed output, shaped like x (b, t, d), and the load-balance loss."""
        likes = self.router(x).softmax(dim=-1)  # (b, t, e)
        combine = self._combine(likes)
        dispatch = (combine > 0).to(x.dtype)
        taken = torch.einsum("btec,btd->becd", dispatch, x)
        hidden = F.gelu(torch.einsum("becd,edh->bech", taken, self.up))
        given = torch.einsum("bech,ehd->becd", hidden, self.down)
        return torch.einsum("btec,becd->btd", combine, given), self._imbalance(likes)

    def _combine(self, likes: Tensor) -> Tensor:
        """Return the weight of each position at each place of each expert, (b, t, e, places)."""
        rows, length, experts = likes.shape
        places = math.ceil(SLACK * self.choices * length / experts)
        weight, choice = likes.topk(self.choices, dim=-1)  # (b, t, k)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        chosen = F.one_hot(choice, experts)  # (b, t, k, e)
        # All first choices queue before all second choices.
        queue = chosen.transpose(1, 2).reshape(rows, -1, experts).cumsum(dim=1) - 1
        queue = queue.view(rows, self.choices, length, experts).transpose(1, 2)
        place = queue[..., None] == torch.arange(places, device=likes.device)  # (b, t, k, e, c)
        seat = place.to(likes.dtype) * chosen[..., None].to(likes.dtype)
        return (weight[..., None, None] * seat).sum(dim=2)

    def _imbalance(self, likes: Tensor) -> Tensor:
        """Return 1 when first choices are spread evenly, `experts` when one gets them all."""
        share = F.one_hot(likes.argmax(dim=-1), self.experts).to(likes.dtype).mean(dim=(0, 1))
        return self.experts * (share * likes.mean(dim=(0, 1))).sum()


class Block(nn.Module):
    """Causal attention, then a mixture of experts."""

    def __init__(self, dim: int, heads: int, hidden: int, experts: int, choices: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mixture = Mixture(dim, hidden, experts, choices)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream (batch, sequence, dim) and the mixture's load-balance loss."""
        q, k, v = (self._heads(part) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y, imbalance = self.mixture(self.norm2(x))
        return x + y, imbalance

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MoE(nn.Module):
    """Predict the next token at every position."""

    def __init__(
        self,
        blocks: int = BLOCKS,
        dim: int = DIM,
        heads: int = HEADS,
        hidden: int = HIDDEN,
        experts: int = EXPERTS,
        choices: int = CHOICES,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(SEQUENCE, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, hidden, experts, choices) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (batch, sequence, vocabulary) and the mean load-balance loss."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        imbalances = []
        for block in self.blocks:
            x, imbalance = block(x)
            imbalances.append(imbalance)
        return self.head(self.norm(x)), torch.stack(imbalances).mean()


def model() -> nn.Module:
    """Build the default mixture of experts."""
    return MoE()


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats, plus a little for uneven load."""
    logits, imbalance = output
    error = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    return error + BALANCE * imbalance


def example_batch() -> dict[str, Tensor]:
    """Return one mini-batch of counting rows."""
    return next(batches(seed=0))


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield rows like 4, 7, 10, ...; the t-th batch depends on seed and t alone."""
    strides = torch.tensor(STRIDES)
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=dice)
        stride = strides[torch.randint(len(STRIDES), (BATCH, 1), generator=dice)]
        rows = (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
