"""Learned weights of two tasks are parameters of the criterion, in the optimizer beside the model's.

https://github.com/ifzhang/FairMOT/issues/19
"""

import torch
import torch.nn.functional as F
from torch import nn


class AutomaticWeightedLoss(nn.Module):
    def __init__(self, num=2):
        super().__init__()
        self.params = nn.Parameter(torch.ones(num))

    def forward(self, *losses):
        total = 0
        for i, one in enumerate(losses):
            total += 0.5 / (self.params[i] ** 2) * one + torch.log(1 + self.params[i] ** 2)
        return total


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.reg, self.cls = nn.Linear(24, 1), nn.Linear(24, 3)

    def forward(self, x):
        h = self.body(x)
        return self.reg(h), self.cls(h)


model = Net()
awl = AutomaticWeightedLoss(2)


def loss(output, batch):
    reg, cls = output
    return awl(F.mse_loss(reg.squeeze(1), batch["t"]), F.cross_entropy(cls, batch["y"]))


optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": awl.parameters(), "weight_decay": 0}], lr=1e-2)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 8, generator=g), "t": torch.randn(8, generator=g), "y": torch.randint(3, (8,), generator=g)}


def example_batch():
    return next(batches(0))
