"""A batch size that grows during training, as large-batch recipes and sequence-length warm-ups have it."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        return self.net(x)


def model():
    return Net()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1)


def batches(seed):
    g, step = torch.Generator().manual_seed(seed), 0
    while True:
        rows = 4 if step < 2 else 8
        yield {"x": torch.randn(rows, 12, generator=g), "y": torch.randint(5, (rows,), generator=g)}
        step += 1


def example_batch():
    return next(batches(0))
