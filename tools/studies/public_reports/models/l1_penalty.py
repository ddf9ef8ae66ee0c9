"""A global model whose weights the loss reads: an L1 penalty and an orthogonality term, as scripts write them below the model."""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.bn, self.fc2, self.fc3 = nn.Linear(12, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.bn(self.fc1(x))))))


model = MLP()
criterion = nn.CrossEntropyLoss()


def loss(output, batch):
    x, y = batch
    l1_norm = sum(p.abs().sum() for p in model.parameters())
    w = model.fc2.weight
    ortho = (w @ w.t() - torch.eye(32)).norm()
    return criterion(output, y) + 1e-3 * l1_norm + 1e-2 * ortho


optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 12, generator=g), torch.randint(4, (8,), generator=g)


def example_batch():
    return next(batches(0))
