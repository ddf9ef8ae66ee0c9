"""LambdaRank on a flat table of documents, with the number of documents of each query beside it.

https://github.com/allegro/allRank
"""

import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 24), nn.ReLU6(), nn.Linear(24, 24), nn.ReLU6(), nn.Linear(24, 1))

    def forward(self, docs):
        return self.net(docs).squeeze(1)


def model():
    return Ranker()


def one_query(scores, rel):
    diff = scores[:, None] - scores[None]
    gain = 2.0**rel - 1
    rank = scores.detach().argsort(descending=True).argsort() + 1.0
    discount = 1 / torch.log2(rank + 1)
    delta = ((gain[:, None] - gain[None]) * (discount[:, None] - discount[None])).abs()
    return (delta * nn.functional.softplus(-diff) * (rel[:, None] > rel[None])).sum()


def loss(output, batch):
    parts = batch["group"].tolist()
    queries = zip(output.split(parts), batch["rel"].split(parts))
    return sum(one_query(s, r) for s, r in queries) / len(parts)


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        cut = (torch.randperm(15, generator=g)[:3] + 1).sort()[0].tolist()
        group = torch.tensor([b - a for a, b in zip([0, *cut], [*cut, 16])])
        yield {"docs": torch.randn(16, 9, generator=g), "rel": torch.randint(3, (16,), generator=g), "group": group}


def example_batch():
    return next(batches(0))
