"""An energy model: negatives by Langevin steps with autograd within forward, started from a replay buffer that forward writes.

https://github.com/rosinality/igebm-pytorch/blob/master/train.py
"""

import random

import torch
from torch import nn


class SampleBuffer:
    def __init__(self, max_samples=64):
        self.max_samples, self.buffer = max_samples, []

    def push(self, samples):
        for sample in samples.detach():
            self.buffer.append(sample)
            if len(self.buffer) > self.max_samples:
                self.buffer.pop(0)

    def get(self, n):
        return torch.stack(random.choices(self.buffer, k=n))


class EBM(nn.Module):
    def __init__(self):
        super().__init__()
        sn = nn.utils.spectral_norm
        self.energy = nn.Sequential(sn(nn.Conv2d(1, 8, 3, 2, 1)), nn.LeakyReLU(0.2), sn(nn.Conv2d(8, 8, 3, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32, 1))
        self.buffer = SampleBuffer()

    def sample(self, like):
        n = sum(random.random() < 0.95 for _ in range(len(like))) if self.buffer.buffer else 0
        fresh = torch.rand_like(like[n:])
        neg = torch.cat([self.buffer.get(n), fresh]) if n else fresh
        for p in self.parameters():
            p.requires_grad_(False)
        for _ in range(3):
            neg = neg.detach().add(torch.randn_like(neg) * 0.005).requires_grad_(True)
            (grad,) = torch.autograd.grad(self.energy(neg).sum(), neg)
            neg = (neg - 10 * grad.clamp(-0.01, 0.01)).clamp(0, 1)
        for p in self.parameters():
            p.requires_grad_(True)
        return neg.detach()

    def forward(self, pos):
        neg = self.sample(pos)
        pos_out, neg_out = self.energy(pos), self.energy(neg)
        self.buffer.push(neg)
        return (pos_out - neg_out).mean() + (pos_out**2 + neg_out**2).mean()


def model():
    return EBM()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, betas=(0.0, 0.999))


def example_batch():
    return {"pos": torch.rand(8, 1, 8, 8)}


def batches(seed):
    while True:
        yield example_batch()
