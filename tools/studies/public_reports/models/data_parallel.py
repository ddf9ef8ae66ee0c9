"""A model wrapped in DataParallel on a machine without cards, whose checkpoints have names with `module.`; a plateau scheduler."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        return self.classifier(self.features(x))


def model():
    return nn.DataParallel(Net())


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1, momentum=0.9)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.1)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 3, 8, 8, generator=g), torch.randint(5, (8,), generator=g)


def example_batch():
    return next(batches(0))
