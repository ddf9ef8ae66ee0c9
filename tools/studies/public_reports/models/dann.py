"""Domain-adversarial training: an autograd.Function turns the gradient round by a factor that grows with the step.

https://github.com/wearepal/conduit/pull/4
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class ReverseLayerF(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.ReLU(True), nn.Flatten())
        self.class_classifier = nn.Sequential(nn.Linear(32, 16), nn.ReLU(True), nn.Linear(16, 4), nn.LogSoftmax(dim=1))
        self.domain_classifier = nn.Sequential(nn.Linear(32, 16), nn.ReLU(True), nn.Linear(16, 2), nn.LogSoftmax(dim=1))

    def forward(self, source, target, alpha):
        s, t = self.feature(source), self.feature(target)
        rev = ReverseLayerF.apply
        return self.class_classifier(s), self.domain_classifier(rev(s, alpha)), self.domain_classifier(rev(t, alpha))


def model():
    return DANN()


def loss(output, batch):
    cls, ds, dt = output
    zeros, ones = torch.zeros(ds.shape[0], dtype=torch.long), torch.ones(dt.shape[0], dtype=torch.long)
    return F.nll_loss(cls, batch["y"]) + F.nll_loss(ds, zeros) + F.nll_loss(dt, ones)


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g, step = torch.Generator().manual_seed(seed), 0
    while True:
        p = step / 40
        yield {
            "source": torch.randn(8, 3, 9, 9, generator=g), "target": 0.5 + torch.randn(8, 3, 9, 9, generator=g),
            "alpha": 2.0 / (1.0 + math.exp(-10 * p)) - 1, "y": torch.randint(4, (8,), generator=g),
        }
        step += 1


def example_batch():
    return next(batches(0))
