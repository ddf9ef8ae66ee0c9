"""A margin on the true class's angle: labels go into forward, and boolean indexing writes into the cosines.

https://github.com/TreB1eN/InsightFace_Pytorch/issues/6
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Arcface(nn.Module):
    def __init__(self, size=16, classnum=10, s=64.0, m=0.5):
        super().__init__()
        self.kernel = nn.Parameter(torch.Tensor(size, classnum))
        self.kernel.data.uniform_(-1, 1).renorm_(2, 1, 1e-5).mul_(1e5)
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)
        self.mm, self.threshold = math.sin(m) * m, math.cos(math.pi - m)

    def forward(self, embeddings, label):
        kernel_norm = self.kernel / torch.norm(self.kernel, 2, 0, True)
        cos_theta = torch.mm(embeddings, kernel_norm).clamp(-1, 1)
        sin_theta = torch.sqrt(1 - torch.pow(cos_theta, 2))
        cos_theta_m = cos_theta * self.cos_m - sin_theta * self.sin_m
        cond_mask = (cos_theta - self.threshold) <= 0
        keep_val = cos_theta - self.mm
        cos_theta_m[cond_mask] = keep_val[cond_mask]
        output = cos_theta * 1.0
        idx_ = torch.arange(0, len(embeddings), dtype=torch.long)
        output[idx_, label] = cos_theta_m[idx_, label]
        return output * self.s


class Face(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.PReLU(16),
            nn.Flatten(), nn.Linear(256, 16), nn.BatchNorm1d(16),
        )
        self.head = Arcface()

    def forward(self, imgs, labels):
        e = self.body(imgs)
        return self.head(e / torch.norm(e, 2, 1, True), labels)


def model():
    return Face()


def loss(output, batch):
    return F.cross_entropy(output, batch["labels"])


def optimizer(named_params):
    named = list(named_params)
    bn = [p for n, p in named if p.ndim == 1]
    rest = [p for n, p in named if p.ndim != 1 and "kernel" not in n]
    head = [p for n, p in named if "kernel" in n]
    return torch.optim.SGD([{"params": rest + head, "weight_decay": 5e-4}, {"params": bn}], lr=0.01, momentum=0.9)


def example_batch():
    return {"imgs": torch.randn(8, 3, 16, 16), "labels": torch.randint(10, (8,))}


def batches(seed):
    while True:
        yield example_batch()
