"""DLRM-like sparse embeddings, one of them unused, SparseAdam beside Adam.

https://github.com/pytorch/pytorch/issues/80496
"""

import torch
import torch.nn.functional as F
from torch import nn


class Ads(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(100, 8, sparse=True)
        self.items = nn.EmbeddingBag(50, 8, mode="mean", sparse=True)
        self.unused = nn.Embedding(10, 8, sparse=True)
        self.bottom = nn.Linear(4, 8)
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, history, dense):
        parts = [self.users(user), self.items(history), self.bottom(dense)]
        return self.top(torch.cat(parts, 1)).squeeze(1)


class SparseAndDense(torch.optim.Optimizer):
    def __init__(self, sparse, dense):
        self.parts = [torch.optim.SparseAdam(sparse, lr=1e-2), torch.optim.Adam(dense, lr=1e-2)]
        super().__init__([*sparse, *dense], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def model():
    return Ads()


def optimizer(named_params):
    named = list(named_params)
    sparse = [p for n, p in named if n.startswith(("users", "items", "unused"))]
    return SparseAndDense(sparse, [p for n, p in named if n.startswith(("bottom", "top"))])


def example_batch():
    return {
        "user": torch.randint(100, (8,)),
        "history": torch.randint(50, (8, 5)),
        "dense": torch.randn(8, 4),
        "click": torch.randint(2, (8,)).float(),
    }


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["click"])
