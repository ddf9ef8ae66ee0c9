"""VICReg: a hinge on each feature's deviation over the batch, and its covariance.

https://github.com/KevinMusgrave/pytorch-metric-learning/issues/535
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        self.projector = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))

    def forward(self, x, y):
        return self.projector(self.backbone(x)), self.projector(self.backbone(y))


def model():
    return Net()


def off_diagonal(x):
    n, m = x.shape
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def loss(output, batch):
    x, y = output
    n = x.shape[0]
    repr_loss = F.mse_loss(x, y)
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    std_x, std_y = torch.sqrt(x.var(dim=0) + 0.0001), torch.sqrt(y.var(dim=0) + 0.0001)
    std_loss = torch.mean(F.relu(1 - std_x)) / 2 + torch.mean(F.relu(1 - std_y)) / 2
    cov_x, cov_y = (x.T @ x) / (n - 1), (y.T @ y) / (n - 1)
    cov_loss = off_diagonal(cov_x).pow_(2).sum().div(8) + off_diagonal(cov_y).pow_(2).sum().div(8)
    return 25 * repr_loss + 25 * std_loss + cov_loss


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=1e-2, momentum=0.9, weight_decay=1e-6)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 20, generator=g)
        yield {"x": x + 0.1 * torch.randn(16, 20, generator=g), "y": x + 0.1 * torch.randn(16, 20, generator=g)}


def example_batch():
    return next(batches(0))
