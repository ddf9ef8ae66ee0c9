"""Weights normalized after each step of the optimizer, each along its own dimension; learned scales, cosine attention.

https://github.com/lucidrains/nGPT-pytorch/issues/1
"""

import torch
import torch.nn.functional as F
from torch import nn


def l2norm(t, dim=-1):
    return F.normalize(t, dim=dim, p=2)


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.query, self.key, self.value, self.att_c_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.c_fc, self.mlp_c_proj = nn.Linear(dim, 64, bias=False), nn.Linear(32, dim, bias=False)
        self.attn_alpha, self.mlp_alpha = (nn.Parameter(torch.full((dim,), 0.25)) for _ in range(2))
        self.sqk, self.suv = nn.Parameter(torch.full((dim,), 0.25)), nn.Parameter(torch.ones(64))

    def forward(self, h):
        b, t, d = h.shape
        q, k, v = (f(h).view(b, t, 2, d // 2).transpose(1, 2) for f in (self.query, self.key, self.value))
        sqk = (self.sqk * 4.0).view(1, 2, 1, d // 2)
        y = F.scaled_dot_product_attention(sqk * l2norm(q), sqk * l2norm(k), v, is_causal=True, scale=(d // 2) ** 0.5)
        a = l2norm(self.att_c_proj(y.transpose(1, 2).reshape(b, t, d)))
        h = l2norm(h + (self.attn_alpha * 0.2).abs() * (a - h))
        u, g = (self.suv * 4.0 * self.c_fc(h)).chunk(2, -1)
        m = l2norm(self.mlp_c_proj(u * F.silu(g)))
        return l2norm(h + (self.mlp_alpha * 0.2).abs() * (m - h))


class NGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.sz = nn.Parameter(torch.full((40,), 0.25))

    def forward(self, idx):
        x = l2norm(self.wte(idx))
        for block in self.h:
            x = block(x)
        return self.sz * 16.0 * self.lm_head(x)


def norm_dim(name):
    return 0 if "c_proj" in name else 1


class AdamThenNorm(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        out = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if group["norm"] is not None:
                    p.copy_(l2norm(p.float(), dim=group["norm"]).to(p.dtype))
        return out


def model():
    made = NGPT()
    for name, p in made.named_parameters():
        if p.ndim == 2:
            p.data.copy_(l2norm(p.data, norm_dim(name)))
    return made


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def optimizer(named_params):
    groups = {}
    for name, p in named_params:
        groups.setdefault(norm_dim(name) if p.ndim == 2 else None, []).append(p)
    return AdamThenNorm([{"params": ps, "norm": norm} for norm, ps in groups.items()], lr=1e-2, betas=(0.9, 0.95))


def example_batch():
    tokens = torch.randint(40, (8, 13))
    return {"idx": tokens[:, :-1], "targets": tokens[:, 1:]}


def batches(seed):
    while True:
        yield example_batch()
