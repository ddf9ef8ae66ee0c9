"""Fine-tuning with layer-wise rates: groups by layer and by decay, warm-up and cosine by LambdaLR, drop path by row."""

import math

import torch
import torch.nn.functional as F
from torch import nn

DEPTH = 4


def drop_path(x, p, training):
    if p == 0.0 or not training:
        return x
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    return x * keep.div_(1 - p)


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm2, self.mlp, self.p = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), p
        self.gamma = nn.Parameter(0.1 * torch.ones(16))

    def forward(self, x):
        h = self.norm1(x)
        x = x + drop_path(self.gamma * self.attn(h, h, h, need_weights=False)[0], self.p, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.p, self.training)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(0.02 * torch.randn(1, 5, 16))
        self.blocks = nn.ModuleList(Block(0.2 * i / (DEPTH - 1)) for i in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def no_weight_decay(self):
        return {"pos_embed", "cls_token"}

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def model():
    return ViT()


def layer_of(name):
    if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks") else DEPTH + 1


def loss(output, batch):
    return torch.sum(-batch["y"] * F.log_softmax(output, dim=-1), dim=-1).mean()


def optimizer(named_params):
    groups = {}
    for name, p in named_params:
        decay = 0.0 if p.ndim == 1 or name in ("pos_embed", "cls_token") else 0.05
        layer = layer_of(name)
        group = groups.setdefault((layer, decay), {"params": [], "weight_decay": decay, "lr": 1e-3 * 0.65 ** (DEPTH + 1 - layer)})
        group["params"].append(p)
    return torch.optim.AdamW(list(groups.values()), lr=1e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (s + 1) / 3 if s < 3 else 0.5 * (1 + math.cos(math.pi * (s - 3) / 20)))


clip_norm = 1.0


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        y = F.one_hot(torch.randint(5, (8,), generator=g), 5).float()
        lam = float(torch.rand((), generator=g))
        yield {"x": torch.randn(8, 3, 8, 8, generator=g), "y": lam * y + (1 - lam) * y.flip(0)}


def example_batch():
    return next(batches(0))
