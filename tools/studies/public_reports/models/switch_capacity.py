"""Top-1 experts with a capacity: tokens that come too late in the batch are dropped, by a sum along all of its tokens.

https://github.com/huggingface/transformers/issues/48293
"""

import torch
import torch.nn.functional as F
from torch import nn

E, D, V = 4, 16, 21


class SwitchMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D)) for _ in range(E))

    def forward(self, hidden):
        b, t, d = hidden.shape
        flat = hidden.reshape(-1, d)
        probs = self.classifier(flat).softmax(-1)
        gate, index = probs.max(-1)
        hot = F.one_hot(index, E)
        capacity = int(1.25 * b * t / E)
        kept = hot * (hot.cumsum(0) <= capacity)
        out = sum(kept[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))
        balance = E * (hot.float().mean(0) * probs.mean(0)).sum()
        return (gate[:, None] * out).view(b, t, d), balance


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norms, self.mlps = nn.Embedding(V, D), nn.ModuleList(nn.LayerNorm(D) for _ in range(2)), nn.ModuleList(SwitchMLP() for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, ids, labels):
        x, aux = self.emb(ids), 0.0
        for norm, mlp in zip(self.norms, self.mlps):
            y, balance = mlp(norm(x))
            x, aux = x + y, aux + balance
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * aux


def model():
    return Net()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=3e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"ids": torch.randint(V, (8, 8), generator=g), "labels": torch.randint(V, (8, 8), generator=g)}


def example_batch():
    return next(batches(0))
