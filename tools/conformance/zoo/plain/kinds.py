"""Other kinds of model: experts, tables, recurrence, attention, graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.conformance.zoo.case import Batch, Case
from tools.conformance.zoo.plain.shared import (
    ROWS,
    WIDTH,
    mse,
    sequences,
    stack,
)


class Experts(nn.Module):
    """A router that sends each token to its two best experts, all experts computed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = torch.topk(self.router(x).softmax(-1), 2)
        gates = torch.zeros_like(x[..., :4]).scatter(-1, chosen, weight)
        made = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + (made * gates.unsqueeze(-2)).sum(-1)


class GatheredExperts(nn.Module):
    """Weights of the chosen expert are gathered for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        probability, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.bmm(x.unsqueeze(1), self.weight[chosen]).squeeze(1)
        return x + made * probability.unsqueeze(-1)


class Recommender(nn.Module):
    """Bags of sparse features, dense features and their products, as in DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(50, 8, mode=mode) for mode in ("sum", "mean", "max")
        )
        self.user = nn.Embedding(20, 8)
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, items: Tensor, user: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        sparse = [bag(items[:, i]) for i, bag in enumerate(self.bags)]
        parts = torch.stack([bottom, self.user(user), *sparse], dim=1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(5, 5, -1)
        pairs = products[:, rows, columns]
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)


def _clicks() -> Batch:
    return {
        "dense": torch.randn(ROWS, 5),
        "items": torch.randint(0, 50, (ROWS, 3, 4)),
        "user": torch.randint(0, 20, (ROWS,)),
        "clicked": torch.rand(ROWS).round(),
    }


def _click_loss(output: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["clicked"])


class OffsetBags(nn.Module):
    """Bags with offsets: the number of items is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, WIDTH, mode="sum")
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        return self.body(self.bag(items, offsets))


class RowBags(nn.Module):
    """A row of indices for each bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, WIDTH, mode="sum")
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, items: Tensor) -> Tensor:
        return self.body(self.bag(items))


class Letters(nn.Module):
    """An embedding, a recurrent net of several layers, and a head."""

    def __init__(
        self, kind: type[nn.LSTM | nn.GRU], depth: int, *, both_ways: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(27, WIDTH)
        self.cells = kind(
            WIDTH, 24, num_layers=depth, dropout=0.1, batch_first=True, bidirectional=both_ways
        )
        self.head = nn.Linear(48 if both_ways else 24, 27)

    def forward(self, letters: Tensor) -> Tensor:
        made, _ = self.cells(self.embed(letters))
        return self.head(made)


class Cells(nn.Module):
    """A recurrent net written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for t in range(x.shape[1]):
            hidden, cell = self.cell(x[:, t], (hidden, cell))
            states.append(hidden)
        return self.head(torch.stack(states, dim=1))


def _text() -> Batch:
    letters = torch.randint(0, 27, (ROWS, 9))
    return {"letters": letters[:, :-1].contiguous(), "targets": letters[:, 1:].contiguous()}


def _text_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


class TorchTransformer(nn.Module):
    """torch's own encoder, and its own decoder."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        back = nn.TransformerDecoderLayer(WIDTH, 4, 32, 0.1, batch_first=True)
        self.decoder = nn.TransformerDecoder(back, depth)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(x, memory, tgt_mask=causal)


class GraphLayer(nn.Module):
    """Message passing over fixed edges: gather, then scatter by sum."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        sent = self.message(x[:, source])
        return x + torch.zeros_like(x).index_add(1, target, F.elu(sent))


CASES = (
    stack("moe", Experts, sequences),
    stack("moe-gathered", GatheredExperts),
    Case("recommender", lambda _: Recommender(), _clicks, _click_loss, depth=0),
    Case(
        "recommender-offsets",
        lambda _: OffsetBags(),
        lambda: {
            "items": torch.randint(0, 50, (40,)),
            "offsets": torch.arange(0, 40, 5),
            "y": torch.randn(ROWS, WIDTH),
        },
        mse,
        depth=0,
        refused=True,  # the second micro-batch has offsets that begin in the middle
        remedy="recommender-offsets-remedied",
    ),
    Case(
        "recommender-offsets-remedied",
        lambda _: RowBags(),
        lambda: {"items": torch.randint(0, 50, (ROWS, 5)), "y": torch.randn(ROWS, WIDTH)},
        mse,
        depth=0,
    ),
    Case("lstm", lambda depth: Letters(nn.LSTM, depth), _text, _text_loss),
    Case(
        "lstm-both-ways", lambda depth: Letters(nn.LSTM, depth, both_ways=True), _text, _text_loss
    ),
    Case("gru", lambda depth: Letters(nn.GRU, depth), _text, _text_loss),
    stack("lstm-cells", Cells, sequences),
    Case("torch-transformer", TorchTransformer, sequences, mse),
    stack("graph", GraphLayer, sequences),
)
