"""Parameters marked _no_weight_decay where they are made, and groups by that mark; a selective scan in a loop.

https://github.com/state-spaces/mamba/issues/798
"""

import torch
import torch.nn.functional as F
from torch import nn


class Mamba(nn.Module):
    def __init__(self, d=16, n=4):
        super().__init__()
        self.in_proj = nn.Linear(d, 2 * d, bias=False)
        self.x_proj = nn.Linear(d, 2 * n + 1, bias=False)
        self.dt = nn.Parameter(torch.zeros(d))
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, n + 1).repeat(d, 1)))
        self.A_log._no_weight_decay = True
        self.D = nn.Parameter(torch.ones(d))
        self.D._no_weight_decay = True
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, u):
        x, z = self.in_proj(u).chunk(2, -1)
        x = F.silu(x)
        n = self.A_log.shape[1]
        dt, b, c = self.x_proj(x).split([1, n, n], -1)
        dt = F.softplus(dt + self.dt)
        a = -torch.exp(self.A_log)
        h, ys = x.new_zeros(x.shape[0], x.shape[2], n), []
        for t in range(x.shape[1]):
            h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1) + self.D * x[:, t])
        return self.out_proj(torch.stack(ys, 1) * F.silu(z))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Mamba() for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x)


def model():
    return LM()


def optimizer(named_params):
    params = [p for _, p in named_params]
    plain = [p for p in params if p.ndim < 2 or getattr(p, "_no_weight_decay", False)]
    held = {id(p) for p in plain}
    return torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": [p for p in params if id(p) not in held]}],
        lr=1e-2,
        weight_decay=0.1,
    )


def example_batch():
    ids = torch.randint(32, (8, 9))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output.transpose(1, 2), batch["labels"])
