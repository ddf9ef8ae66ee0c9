"""Crops of two sizes, prototypes normalized before each forward, Sinkhorn codes, and no gradient for prototypes at first.

https://github.com/facebookresearch/swav/issues/76
"""

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 8


@torch.no_grad()
def sinkhorn(out, rounds=3):
    Q = torch.exp(out / 0.05).t()
    B, K = Q.shape[1], Q.shape[0]
    Q /= torch.sum(Q)
    for _ in range(rounds):
        Q /= torch.sum(Q, dim=1, keepdim=True)
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    return (Q * B).t()


class SwAV(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projection_head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.prototypes = nn.Linear(8, 6, bias=False)

    def forward(self, crops):
        with torch.no_grad():
            w = self.prototypes.weight.data.clone()
            w = F.normalize(w, dim=1, p=2)
            self.prototypes.weight.copy_(w)
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, output = 0, None
        for end in ends:
            out = self.trunk(torch.cat(crops[start:end]))
            output = out if start == 0 else torch.cat((output, out))
            start = end
        z = F.normalize(self.projection_head(output), dim=1, p=2)
        return self.prototypes(z)


def loss(output, batch):
    bs, total = output.shape[0] // len(batch["crops"]), 0
    for crop in (0, 1):
        q = sinkhorn(output[bs * crop : bs * (crop + 1)].detach().clone())
        for v in (v for v in range(len(batch["crops"])) if v != crop):
            total = total - torch.mean(torch.sum(q * F.log_softmax(output[bs * v : bs * (v + 1)] / 0.1, dim=1), dim=1))
    return total / 2


class SGD(torch.optim.SGD):
    def __init__(self, named, freeze=2, **kw):
        super().__init__([{"params": [p for n, p in named if "prototypes" not in n]}, {"params": [p for n, p in named if "prototypes" in n]}], **kw)
        self.freeze, self.iteration = freeze, 0

    def step(self, closure=None):
        if self.iteration < self.freeze:
            for p in self.param_groups[1]["params"]:
                p.grad = None
        self.iteration += 1
        return super().step(closure)


def model():
    return SwAV()


def optimizer(named_params):
    return SGD(list(named_params), lr=0.1, momentum=0.9, weight_decay=1e-6)


def example_batch():
    return {"crops": [torch.randn(ROWS, 3, s, s) for s in (12, 12, 8, 8)]}


def batches(seed):
    while True:
        yield example_batch()
