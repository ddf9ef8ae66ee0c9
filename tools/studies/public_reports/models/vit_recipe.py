"""timm's recipe: mixup or cutmix by NumPy in the collate, BCE on soft targets, drop path, layer decay, checkpoints by a flag.

https://github.com/pytorch/pytorch/issues/141177
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES, DEPTH = 5, 4


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0, scale_by_keep=True):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0 and self.scale_by_keep:
            mask.div_(keep)
        return x * mask


class LayerScale(nn.Module):
    def __init__(self, dim, init=1e-4, inplace=True):
        super().__init__()
        self.inplace, self.gamma = inplace, nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.ls1, self.ls2, self.drop_path = LayerScale(dim), LayerScale(dim), DropPath(drop)

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 2, C // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, r.item()) for r in torch.linspace(0, 0.2, DEPTH)])
        self.norm, self.head, self.grad_checkpointing = nn.LayerNorm(dim), nn.Linear(dim, CLASSES), False

    @torch.jit.ignore
    def no_weight_decay(self):
        return {"pos_embed", "cls_token"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        if self.grad_checkpointing and not torch.jit.is_scripting():
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.head(self.norm(x)[:, 0])


def model():
    made = ViT()
    made.set_grad_checkpointing()
    return made


def layer_id(name):
    if name.startswith(("cls_token", "pos_embed", "patch_embed")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks") else DEPTH + 1


def optimizer(named_params):
    groups = {}
    for name, p in named_params:
        decay = 0.0 if p.ndim <= 1 or name in {"pos_embed", "cls_token"} else 0.05
        key = f"layer_{layer_id(name)}_{decay}"
        scale = 0.75 ** (DEPTH + 1 - layer_id(name))
        groups.setdefault(key, {"lr_scale": scale, "lr": 1e-3 * scale, "weight_decay": decay, "params": []})["params"].append(p)
    return torch.optim.AdamW(list(groups.values()), lr=1e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2)


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["target"].gt(0.1).type(batch["target"].dtype))


def collate(images, labels):
    lam = np.random.beta(0.8, 0.8) if np.random.rand() < 0.5 else 1.0
    if lam == 1.0:
        lam = np.random.beta(1.0, 1.0)
        cut = int(16 * np.sqrt(1 - lam))
        y, x = np.random.randint(0, 16 - cut + 1, 2)
        images[:, :, y : y + cut, x : x + cut] = images.flip(0)[:, :, y : y + cut, x : x + cut]
        lam = 1 - cut * cut / 256
    else:
        flipped = images.flip(0).mul_(1.0 - lam)
        images.mul_(lam).add_(flipped)
    hot = torch.full((len(labels), CLASSES), 0.1 / CLASSES).scatter_(1, labels.view(-1, 1), 0.9 + 0.1 / CLASSES)
    return {"x": images, "target": hot * lam + hot.flip(0) * (1.0 - lam)}


def example_batch():
    return collate(torch.randn(8, 3, 16, 16), torch.randint(CLASSES, (8,)))


def batches(seed):
    np.random.seed(seed)
    while True:
        yield example_batch()
