"""Lazy modules, whose sizes the first batch tells.

https://github.com/meta-pytorch/torchrec/issues/740
"""

import torch
import torch.nn.functional as F
from torch import nn


def model():
    return nn.Sequential(
        nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(4),
    )


def example_batch():
    return torch.randn(8, 3, 8, 8), torch.randint(4, (8,))


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)
