"""The norm of the loss's gradient by the input is part of the loss.

https://github.com/pytorch/pytorch/issues/7714
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 8, 3, padding=1), nn.Softplus())
        self.head = nn.Linear(8, 4)

    def score(self, x):
        return self.head(self.body(x).mean((2, 3)))

    def forward(self, x, y):
        x = x.requires_grad_()
        loss = F.cross_entropy(self.score(x), y)
        grad = torch.autograd.grad(loss, x, create_graph=True)[0]
        return loss + grad.square().mean() * x.shape[0]


def model():
    return Net()


def example_batch():
    return {"x": torch.randn(8, 3, 8, 8), "y": torch.randint(4, (8,))}


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    return torch.optim.SGD(named_params, lr=0.05)
