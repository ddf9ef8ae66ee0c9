"""One graph, whole in every batch: normalized adjacency by scatter, attention over edges, a mask of nodes in the loss.

https://github.com/pyg-team/pytorch_geometric/blob/master/examples/gcn.py
"""

import torch
import torch.nn.functional as F
from torch import nn

NODES = 24


def gcn_norm(edge_index, num_nodes):
    loops = torch.arange(num_nodes)
    edge_index = torch.cat([edge_index, torch.stack([loops, loops])], 1)
    row, col = edge_index
    deg = torch.zeros(num_nodes).scatter_add_(0, col, torch.ones(col.size(0)))
    inv = deg.pow_(-0.5)
    inv.masked_fill_(inv == float("inf"), 0)
    return edge_index, inv[row] * inv[col]


class GCNConv(nn.Module):
    def __init__(self, a, b, cached=True):
        super().__init__()
        self.lin, self.bias = nn.Linear(a, b, bias=False), nn.Parameter(torch.zeros(b))
        self.cached, self._cached_edge_index = cached, None

    def forward(self, x, edge_index):
        cache = self._cached_edge_index
        if cache is None:
            cache = gcn_norm(edge_index, x.size(0))
            if self.cached:
                self._cached_edge_index = cache
        (row, col), weight = cache
        x = self.lin(x)
        return torch.zeros_like(x).index_add_(0, col, weight.view(-1, 1) * x[row]) + self.bias


class GATConv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.lin, self.att_src, self.att_dst = nn.Linear(a, b, bias=False), nn.Parameter(torch.randn(b)), nn.Parameter(torch.randn(b))

    def forward(self, x, edge_index):
        x, (src, dst) = self.lin(x), edge_index
        alpha = F.leaky_relu((x * self.att_src).sum(-1)[src] + (x * self.att_dst).sum(-1)[dst], 0.2)
        top = torch.full((len(x),), -1e9).scatter_reduce(0, dst, alpha, "amax", include_self=False)
        out = (alpha - top.detach()[dst]).exp()
        total = torch.zeros(len(x)).index_add(0, dst, out)
        return torch.zeros_like(x).index_add(0, dst, (out / (total[dst] + 1e-16)).unsqueeze(-1) * x[src])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = GCNConv(8, 16), GATConv(16, 16), GCNConv(16, 4)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = F.dropout(F.relu(self.conv1(x, edge_index)), p=0.5, training=self.training)
        return F.log_softmax(self.conv3(F.elu(self.conv2(x, edge_index)), edge_index), dim=1)


generator = torch.Generator().manual_seed(12)
data = {
    "x": torch.rand(NODES, 8, generator=generator), "edge_index": torch.randint(NODES, (2, 70), generator=generator),
    "y": torch.randint(4, (NODES,), generator=generator), "train_mask": torch.rand(NODES, generator=generator) < 0.4,
}


def model():
    return Net()


def loss(out, data):
    return F.nll_loss(out[data["train_mask"]], data["y"][data["train_mask"]])


def optimizer(named_params):
    named = list(named_params)
    return torch.optim.Adam(
        [{"params": [p for n, p in named if "conv3" not in n], "weight_decay": 5e-4}, {"params": [p for n, p in named if "conv3" in n], "weight_decay": 0}], lr=0.01
    )


def example_batch():
    return dict(data)


def batches(seed):
    while True:
        yield dict(data)
