"""Packed instruction data of which most batches are full: only some have padding whose labels are ignored.

https://github.com/axolotl-ai-cloud/axolotl/issues/3196
"""

import torch
import torch.nn.functional as F
from torch import nn

V = 17


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.qkv, self.o = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p.view(b, t, 2, 8).transpose(1, 2) for p in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.silu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.norm, self.out = nn.Embedding(V, 16), nn.ModuleList(Block() for _ in range(3)), nn.RMSNorm(16), nn.Linear(16, V)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for b in self.blocks:
            x = b(x)
        return self.out(self.norm(x))


def model():
    return LM()


def loss(output, batch):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def optimizer(named_params):
    named = list(named_params)
    decay = [p for _, p in named if p.dim() >= 2]
    rest = [p for _, p in named if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95))


clip_norm = 1.0


def batches(seed):
    g, n = torch.Generator().manual_seed(seed), 0
    while True:
        ids = torch.randint(V, (8, 12), generator=g)
        labels = ids.clone()
        if n % 5 == 3:
            labels[5:, 4:] = -100
        n += 1
        yield {"input_ids": ids, "labels": labels}


def example_batch():
    return next(batches(0))
