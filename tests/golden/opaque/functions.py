"""What stages call as it is, copied from moe.py."""

from __future__ import annotations

import math

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
VOCABULARY = 32
SEQUENCE = 32


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


user_model = model
