"""Tables as embedding bags: a list of indices and a list of offsets, one pair a table, each batch with other numbers of indices.

https://github.com/facebookresearch/dlrm/issues/63
"""

import torch
import torch.nn.functional as F
from torch import nn

TABLES = (20, 30, 10)


class DLRM(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in TABLES)
        self.bot_l = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        self.register_buffer("pairs", torch.tril_indices(len(TABLES) + 1, len(TABLES) + 1, -1), persistent=False)
        self.top_l = nn.Sequential(nn.Linear(dim + 6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense_x, lS_o, lS_i):
        x = self.bot_l(dense_x)
        ly = [E(index, offset) for E, index, offset in zip(self.emb_l, lS_i, lS_o)]
        T = torch.cat([x] + ly, dim=1).view(x.shape[0], -1, x.shape[1])
        Z = torch.bmm(T, T.transpose(1, 2))
        return self.top_l(torch.cat([x, Z[:, self.pairs[0], self.pairs[1]]], dim=1))


def model():
    return DLRM()


def loss(output, batch):
    return F.binary_cross_entropy(output, batch["T"])


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10, power=2)


def example_batch():
    offsets, indices = [], []
    for n in TABLES:
        counts = torch.randint(1, 4, (8,))
        offsets.append(counts.cumsum(0) - counts)
        indices.append(torch.randint(n, (int(counts.sum()),)))
    return {"dense_x": torch.randn(8, 4), "lS_o": torch.stack(offsets), "lS_i": indices, "T": torch.rand(8, 1).round()}


def batches(seed):
    while True:
        yield example_batch()
