"""Weights of groups that each batch's losses move, kept in a buffer of the loss, which is a module.

https://github.com/facebookresearch/BalancingGroups/issues/8
"""

import torch
import torch.nn.functional as F
from torch import nn


class GroupDRO(nn.Module):
    def __init__(self, groups=4, eta=0.1):
        super().__init__()
        self.eta = eta
        self.register_buffer("q", torch.ones(groups))

    def groups_(self, g):
        for one in g.unique():
            yield one, g == one

    def forward(self, output, batch):
        losses = F.cross_entropy(output, batch["y"], reduction="none")
        for idx_g, idx_b in self.groups_(batch["g"]):
            self.q[idx_g] *= (self.eta * losses[idx_b].mean()).exp().item()
        self.q /= self.q.sum()
        value = 0
        for idx_g, idx_b in self.groups_(batch["g"]):
            value += self.q[idx_g] * losses[idx_b].mean()
        return value


def model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2),
    )


loss = GroupDRO()


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.05, momentum=0.9, weight_decay=1e-3)


def example_batch():
    return {"input": torch.randn(12, 3, 8, 8), "y": torch.randint(2, (12,)), "g": torch.randint(4, (12,))}


def batches(seed):
    while True:
        yield example_batch()
