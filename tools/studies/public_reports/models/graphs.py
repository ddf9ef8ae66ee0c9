"""Graphs of unlike size in one table of nodes; GCN, batch norm, mean pool over int(batch.max()) + 1 graphs.

https://github.com/pyg-team/pytorch_geometric/issues/1810
"""

import torch
import torch.nn.functional as F
from torch import nn


class GCNConv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.lin = nn.Linear(a, b)

    def forward(self, x, edge_index):
        row, col = edge_index
        deg = torch.zeros(x.shape[0]).index_add_(0, col, torch.ones(col.shape[0])) + 1
        norm = deg[row].rsqrt() * deg[col].rsqrt()
        x = self.lin(x)
        return torch.zeros_like(x).index_add_(0, col, x[row] * norm[:, None]) + x / deg[:, None]


def global_mean_pool(x, batch):
    size = int(batch.max()) + 1
    total = x.new_zeros(size, x.shape[1]).index_add_(0, batch, x)
    count = x.new_zeros(size).index_add_(0, batch, torch.ones(batch.shape[0]))
    return total / count.clamp(min=1)[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(5, 16), GCNConv(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x, edge_index, batch):
        h = F.relu(self.norm(self.conv1(x, edge_index)))
        h = F.relu(self.conv2(h, edge_index))
        return self.head(global_mean_pool(h, batch))


def model():
    return Net()


def example_batch():
    sizes = torch.randint(4, 9, (8,)).tolist()
    first, edges, owner = 0, [], []
    for number, size in enumerate(sizes):
        edges.append(torch.randint(size, (2, 2 * size)) + first)
        owner += [number] * size
        first += size
    return {
        "x": torch.randn(first, 5),
        "edge_index": torch.cat(edges, 1),
        "batch": torch.tensor(owner),
        "y": torch.randint(3, (8,)),
    }


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(named_params):
    return torch.optim.Adam(named_params, lr=1e-2)
