"""A target network that follows by EMA after the optimizer's step, batch norm, a symmetric loss.

https://github.com/lucidrains/ema-pytorch/issues/9
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, b))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.predictor = mlp(12, 8), mlp(8, 8)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad_(False)

    def forward(self, a, b):
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.target(a), self.target(b)
        return (2 - F.cosine_similarity(pa, tb) - F.cosine_similarity(pb, ta)).mean()


byol = None


def model():
    global byol
    byol = BYOL()
    return byol


def optimizer(named_params):
    made = torch.optim.SGD([p for _, p in named_params], lr=0.05, momentum=0.9)

    @torch.no_grad()
    def follow(*_):
        for o, t in zip(byol.online.parameters(), byol.target.parameters()):
            t.mul_(0.99).add_(o, alpha=0.01)

    made.register_step_post_hook(follow)
    return made


def example_batch():
    x = torch.randn(16, 12)
    return {"a": x + 0.1 * torch.randn(16, 12), "b": x + 0.1 * torch.randn(16, 12)}


def batches(seed):
    while True:
        yield example_batch()
