"""A generator and a discriminator with an optimizer each, trained in turn.

https://github.com/Lightning-AI/pytorch-lightning/issues/2820
"""

import torch
import torch.nn.functional as F
from torch import nn


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.calls = 0

    def toggle(self, own, other):
        for p in own.parameters():
            p.requires_grad = True
        for p in other.parameters():
            p.requires_grad = False

    def forward(self, real, noise):
        turn = self.calls % 2
        self.calls += 1
        if turn == 0:
            self.toggle(self.generator, self.discriminator)
            return F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.toggle(self.discriminator, self.generator)
        fake = self.generator(noise)
        return (F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake))).mean()


class Both(torch.optim.Optimizer):
    def __init__(self, g, d):
        super().__init__([*g, *d], {})
        self.g, self.d, self.turn = torch.optim.Adam(g, 2e-3), torch.optim.Adam(d, 2e-3), 0

    def step(self, closure=None):
        (self.d if self.turn % 2 else self.g).step()
        self.turn += 1


def model():
    return GAN()


def optimizer(named_params):
    named = list(named_params)
    return Both(
        [p for n, p in named if n.startswith("generator")],
        [p for n, p in named if n.startswith("discriminator")],
    )


def example_batch():
    return {"real": torch.randn(8, 8), "noise": torch.randn(8, 4)}


def batches(seed):
    while True:
        yield example_batch()
