"""Centres of classes are parameters of the loss, and have an optimizer of their own whose gradients are scaled.

https://github.com/KaiyangZhou/pytorch-center-loss/issues/2
"""

import torch
from torch import nn

ALPHA = 0.5


class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 6))

    def forward(self, x, labels):
        distmat = x.pow(2).sum(1, keepdim=True) + self.centers.pow(2).sum(1)[None] - 2 * x @ self.centers.t()
        mask = labels[:, None] == torch.arange(4)[None]
        return (distmat * mask.float()).clamp(min=1e-12, max=1e12).sum() / x.shape[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.PReLU(), nn.Conv2d(8, 8, 3), nn.PReLU(), nn.Flatten())
        self.fc1, self.fc2 = nn.Linear(32, 6), nn.Linear(6, 4)
        self.criterion_cent = CenterLoss()

    def forward(self, x, y):
        f = self.fc1(self.conv(x))
        return self.fc2(f), self.criterion_cent(f, y)


def model():
    return Net()


def loss(output, batch):
    logits, cent = output
    return nn.functional.cross_entropy(logits, batch["y"]) + ALPHA * cent


class Both(torch.optim.SGD):
    """The loop's `param.grad.data *= 1 / alpha` before the step."""

    def step(self, closure=None):
        for group in self.param_groups:
            if group["cent"]:
                for p in group["params"]:
                    p.grad.data *= 1.0 / ALPHA
        return super().step(closure)


def optimizer(named_params):
    named = list(named_params)
    return Both([
        {"params": [p for n, p in named if "criterion_cent" not in n], "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "cent": False},
        {"params": [p for n, p in named if "criterion_cent" in n], "lr": 0.5, "cent": True},
    ], lr=0.01)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 1, 9, 9, generator=g), "y": torch.randint(4, (8,), generator=g)}


def example_batch():
    return next(batches(0))
