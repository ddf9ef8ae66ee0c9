"""Triplets of the hardest rows in a batch of P identities with K images each, and an identity loss.

https://github.com/michuanhaohao/reid-strong-baseline
"""

import torch
import torch.nn.functional as F
from torch import nn


class ReID(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.bottleneck = nn.LayerNorm(16)
        self.classifier = nn.Linear(16, 6, bias=False)

    def forward(self, img):
        feat = self.base(img)
        return self.classifier(self.bottleneck(feat)), feat


def model():
    return ReID()


def hard_example_mining(dist, labels):
    n = dist.size(0)
    is_pos = labels.expand(n, n).eq(labels.expand(n, n).t())
    dist_ap, _ = torch.max(dist[is_pos].contiguous().view(n, -1), 1, keepdim=True)
    dist_an, _ = torch.min(dist[~is_pos].contiguous().view(n, -1), 1, keepdim=True)
    return dist_ap.squeeze(1), dist_an.squeeze(1)


def loss(output, batch):
    score, feat = output
    xx = feat.pow(2).sum(1, keepdim=True)
    dist = (xx + xx.t() - 2 * feat @ feat.t()).clamp(min=1e-12).sqrt()
    dist_ap, dist_an = hard_example_mining(dist, batch["pid"])
    return F.cross_entropy(score, batch["pid"]) + F.margin_ranking_loss(dist_an, dist_ap, torch.ones_like(dist_an), margin=0.3)


def optimizer(named_params):
    params = []
    for key, value in named_params:
        params += [{"params": [value], "lr": 7e-4 if "bias" in key else 3.5e-4, "weight_decay": 5e-4}]
    return torch.optim.Adam(params)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randperm(6, generator=g)[:4].repeat_interleave(4)
        yield {"img": torch.randn(16, 3, 8, 8, generator=g), "pid": ids}


def example_batch():
    return next(batches(0))
