"""The trunk runs a number of cycles that the batch brings, all but the last without gradient, outputs fed back.

https://github.com/aqlaboratory/openfold/issues/105
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class PairBlock(nn.Module):
    def __init__(self, s=12, z=8):
        super().__init__()
        self.norm_s, self.norm_z = nn.LayerNorm(s), nn.LayerNorm(z)
        self.q, self.k, self.v, self.bias = nn.Linear(s, s), nn.Linear(s, s), nn.Linear(s, s), nn.Linear(z, 2, bias=False)
        self.a, self.b, self.out = nn.Linear(s, z), nn.Linear(s, z), nn.Linear(z, z)
        self.left, self.right, self.gate = nn.Linear(z, z), nn.Linear(z, z), nn.Linear(z, z)

    def forward(self, s, z):
        h = self.norm_s(s)
        q, k, v = (f(h).unflatten(-1, (2, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = s + F.scaled_dot_product_attention(q, k, v, self.bias(z).permute(0, 3, 1, 2)).transpose(1, 2).flatten(2)
        z = z + self.out(self.a(s)[:, :, None] * self.b(s)[:, None])
        n = self.norm_z(z)
        return s, z + torch.sigmoid(self.gate(n)) * torch.einsum("bikc,bjkc->bijc", self.left(n), self.right(n))


class Fold(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_s, self.embed_l, self.embed_r = nn.Embedding(21, 12), nn.Embedding(21, 8), nn.Embedding(21, 8)
        self.recycle_s, self.recycle_z, self.recycle_d = nn.LayerNorm(12), nn.LayerNorm(8), nn.Linear(5, 8)
        self.blocks = nn.ModuleList(PairBlock() for _ in range(2))
        self.xyz, self.distogram = nn.Linear(12, 3), nn.Linear(8, 5)

    def iteration(self, aatype, prevs):
        s, z = self.embed_s(aatype), self.embed_l(aatype)[:, :, None] + self.embed_r(aatype)[:, None]
        s_prev, z_prev, x_prev = prevs
        bins = torch.linspace(0.5, 4, 5)
        d = torch.cdist(x_prev, x_prev).unsqueeze(-1)
        z = z + self.recycle_d((d > bins).to(z.dtype)) + self.recycle_z(z_prev)
        s = s + self.recycle_s(s_prev)
        for block in self.blocks:
            s, z = checkpoint(block, s, z, use_reentrant=False) if torch.is_grad_enabled() else block(s, z)
        return s, z, self.xyz(s)

    def forward(self, aatype, no_recycling_iters):
        b, n = aatype.shape
        prevs = [torch.zeros(b, n, 12), torch.zeros(b, n, n, 8), torch.zeros(b, n, 3)]
        is_grad_enabled, cycles = torch.is_grad_enabled(), int(no_recycling_iters) + 1
        for cycle in range(cycles):
            final = cycle == cycles - 1
            with torch.set_grad_enabled(is_grad_enabled and final):
                s, z, x = self.iteration(aatype, prevs)
                if not final:
                    prevs = [s, z, x]
        return x, self.distogram(z + z.transpose(1, 2))


def loss(output, batch):
    x, logits = output
    want = torch.cdist(batch["coords"], batch["coords"])
    fape = (torch.cdist(x, x) - want).abs().clamp(max=10.0).mean()
    return fape + 0.3 * F.cross_entropy(logits.permute(0, 3, 1, 2), torch.bucketize(want, torch.linspace(0.5, 3, 4)))


def model():
    return Fold()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, eps=1e-5)


clip_norm = 0.1


def example_batch():
    return {"aatype": torch.randint(21, (4, 8)), "no_recycling_iters": torch.tensor(2), "coords": torch.randn(4, 8, 3)}


def batches(seed):
    while True:
        yield {**example_batch(), "no_recycling_iters": torch.randint(4, ())}
