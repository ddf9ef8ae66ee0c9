"""Sampled neighbourhoods: the batch's nodes begin with its seeds, and only these have a loss.

https://github.com/pyg-team/pytorch_geometric/issues/9924
"""

import torch
import torch.nn.functional as F
from torch import nn


class SAGEConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        total = torch.zeros_like(x).index_add(0, dst, x[src])
        deg = torch.zeros(x.shape[0]).index_add(0, dst, torch.ones(dst.shape[0])).clamp(min=1)
        return self.lin_l(total / deg[:, None]) + self.lin_r(x)


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(12, 24), SAGEConv(24, 5)])

    def forward(self, x, edge_index):
        x = F.relu(self.convs[0](x, edge_index))
        return self.convs[1](x, edge_index)


def model():
    return SAGE()


def loss(output, batch):
    return F.cross_entropy(output[: batch["batch_size"]], batch["y"][: batch["batch_size"]])


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=3e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        nodes, edges = 40, 96
        yield {
            "x": torch.randn(nodes, 12, generator=g), "edge_index": torch.randint(nodes, (2, edges), generator=g),
            "y": torch.randint(5, (nodes,), generator=g), "batch_size": 8,
        }


def example_batch():
    return next(batches(0))
