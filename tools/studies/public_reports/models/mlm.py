"""Masked language modelling with masks drawn within forward, and logits of masked positions alone."""

import torch
import torch.nn.functional as F
from torch import nn

V, MASK = 23, 22


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, 16), nn.Parameter(0.02 * torch.randn(10, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, V)

    def forward(self, ids):
        p = torch.full(ids.shape, 0.3)
        masked = torch.bernoulli(p).bool()
        labels = ids.masked_fill(~masked, -100)
        x = self.encoder(self.emb(ids.masked_fill(masked, MASK)) + self.pos)
        return F.cross_entropy(self.head(x).view(-1, V), labels.view(-1))


def model():
    return Bert()


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"ids": torch.randint(V - 1, (8, 10), generator=g)}


def example_batch():
    return next(batches(0))
