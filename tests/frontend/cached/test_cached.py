"""One position at a time with keys and values kept, against the untouched model on whole rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError, CaptureError
from bigbrain_fx.frontend import Cached, require_same, with_cache

WORDS, LENGTH, DIM, HEADS = 31, 20, 16, 2


class ByHand(nn.Module):
    """Attention by products, a mask from a buffer, heads cut out of one projection."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, dim = x.size()
        q, k, v = (
            part.view(rows, length, HEADS, dim // HEADS).transpose(1, 2)
            for part in self.qkv(x).split(dim, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        mixed = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(rows, length, dim))


class Slopes(nn.Module):
    """Attention by letters, with a penalty that grows with the distance."""

    slopes: Tensor

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.is_causal = is_causal
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float())

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (f(x).view(rows, length, HEADS, -1) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        places = torch.arange(length)
        scores = scores - self.slopes.view(1, -1, 1, 1) * (places[:, None] - places[None]).abs()
        if self.is_causal:
            scores = scores + torch.full((length, length), float("-inf")).triu(1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(rows, length, DIM)


class Grouped(nn.Module):
    """Fused attention; two heads of queries share one of keys and values; rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        angles = torch.outer(torch.arange(length).float(), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        angles = torch.cat((angles, angles), -1)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 1, -1)).permute(2, 0, 3, 1, 4)
        q, k = (p * angles.cos() + p.roll(4, -1) * angles.sin() for p in (q, k))
        k, v = (p.repeat_interleave(HEADS, 1) for p in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Words(nn.Module):
    """Words in, attention, scores out; `last`: the scores of the last position alone."""

    def __init__(self, attention: nn.Module, last: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.attention, self.last = attention, last
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        x = x + self.attention(F.layer_norm(x, (DIM,)))
        return self.head(x[:, [-1]] if self.last else x)


class Learned(Words):
    """Positions are a parameter that is cut."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__(attention)
        self.place = nn.Parameter(torch.randn(1, LENGTH, DIM))  # type: ignore[assignment]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.place[:, : tokens.shape[1]]  # type: ignore[index]
        return self.head(x + self.attention(x))


def batch(dtype: torch.dtype = torch.int64) -> Mapping[str, Tensor]:
    return {"tokens": torch.arange(4 * LENGTH).view(4, LENGTH).to(dtype) * 7 % WORDS}


def made(model: nn.Module, places: int = 3) -> Cached:
    return with_cache(model, batch(), places)[0]


@pytest.mark.gate("ByHand-sizes0")
@pytest.mark.parametrize(
    ("attention", "sizes"),
    [
        (ByHand, [(4, LENGTH, 8, 2), (4, LENGTH, 2, 8)]),
        (Slopes, [(4, LENGTH, 2, 8)] * 2),
        (Grouped, [(4, LENGTH, 1, 8)] * 2),
    ],
)
def test_each_position_has_the_scores_of_the_whole_row(
    attention: type[nn.Module], sizes: list[tuple[int, ...]]
) -> None:
    """Caches hold what is small: keys before they are repeated, for one row more than asked."""
    torch.manual_seed(0)
    found = made(Words(attention()).double())
    assert require_same(found.row, found) < 1e-12
    assert [tuple(found.get_buffer(name).shape) for name in found.caches] == sizes
    assert all(name.startswith("attention.") for name in found.caches)


def test_scores_of_the_last_position_alone_and_positions_that_are_a_parameter() -> None:
    torch.manual_seed(0)
    for model in (Words(ByHand(), last=True), Learned(Grouped())):
        found = made(model.double())
        assert require_same(found.row, found) < 1e-12


def test_greedy_tokens_are_those_of_the_untouched_model() -> None:
    """Two rows at unlike positions, each as eager torch generates it alone."""
    torch.manual_seed(1)
    model = Words(Slopes())
    found = made(model)
    known = [[3, 1, 4, 1], [5, 9]]
    wanted = [greedy(model, row, 10) for row in known]
    ends = [0, 0]
    while any(len(row) < len(want) for row, want in zip(known, wanted, strict=True)):
        rows = [r for r in (0, 1) if len(known[r]) < len(wanted[r])]
        tokens = torch.tensor([[known[r][ends[r]]] for r in rows])
        scores = found(tokens, torch.tensor(rows), torch.tensor([ends[r] for r in rows]))
        for r, word in zip(rows, scores[:, 0].argmax(-1).tolist(), strict=True):
            ends[r] += 1
            known[r] += [word] if ends[r] == len(known[r]) else []
    assert known == wanted


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Generate as anybody would: the whole row for each token."""
    known = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            known.append(int(model(torch.tensor([known]))[0, -1].argmax()))
    return known


class Summed(Words):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(self.embed(tokens).cumsum(1))


class Fixed(Words):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(self.embed(tokens) + self.place.weight)


class Noisy(Words):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(F.dropout(self.embed(tokens), 0.5, training=True))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: Words(Slopes(is_causal=False)), "is another model: scores at position"),
        (lambda: Summed(Slopes()), "is another model: scores at position"),
        (lambda: Fixed(Slopes()), "rows of 20 tokens only|must match"),
        (lambda: Noisy(Slopes()), "random numbers are drawn at inference: .*dropout"),
    ],
)
def test_code_without_a_cached_form_is_refused(model: type[nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=says) as refused:
        made(model())
    assert "leave --kv-cache out" in str(refused.value.help)


def test_more_rows_than_this_host_has_memory_for() -> None:
    with pytest.raises(CaptureError, match=r"10,000,000,000 rows .* 2,560 bytes each") as refused:
        made(Words(ByHand()), 10**10)
    assert "fewer rows" in str(refused.value.help)


def test_no_rows_of_tokens() -> None:
    with pytest.raises(BigBrainError, match="rows of tokens"):
        with_cache(nn.Linear(LENGTH, 4), torch.randn(4, LENGTH), 2)
