"""Points on a ball: a subclass of nn.Parameter with its manifold, which a Riemannian optimizer asks for.

https://github.com/geoopt/geoopt/issues/97
"""

import torch
import torch.nn.functional as F
from torch import nn


class Ball:
    def __init__(self, c=1.0):
        self.c = c

    def egrad2rgrad(self, x, u):
        return u * ((1 - self.c * x.pow(2).sum(-1, keepdim=True)) ** 2 / 4)

    def projx(self, x):
        norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-15)
        limit = (1 - 4e-3) / self.c**0.5
        return torch.where(norm > limit, x / norm * limit, x)

    def dist(self, x, y):
        top = 2 * self.c * (x - y).pow(2).sum(-1)
        low = (1 - self.c * x.pow(2).sum(-1)) * (1 - self.c * y.pow(2).sum(-1))
        return torch.acosh((1 + top / low.clamp_min(1e-5)).clamp_min(1 + 1e-6))


class ManifoldParameter(nn.Parameter):
    def __new__(cls, data=None, manifold=None, requires_grad=True):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.manifold = manifold
        return made

    @torch.no_grad()
    def proj_(self):
        return self.copy_(self.manifold.projx(self))


class RiemannianSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if isinstance(p, ManifoldParameter):
                    grad = p.manifold.egrad2rgrad(p, p.grad)
                    p.copy_(p.manifold.projx(p - group["lr"] * grad))
                else:
                    p.add_(p.grad, alpha=-group["lr"])


class Poincare(nn.Module):
    def __init__(self, nodes=30, dim=4):
        super().__init__()
        self.manifold = Ball()
        self.lookup = ManifoldParameter(torch.randn(nodes, dim) * 0.1, manifold=self.manifold)
        self.lookup.proj_()
        self.score = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, pairs):
        e = F.embedding(pairs, self.lookup)
        d = self.manifold.dist(e[:, :1].expand_as(e[:, 1:]), e[:, 1:])
        return -d + self.score(d.unsqueeze(-1)).squeeze(-1)


def model():
    return Poincare()


def loss(output, batch):
    return F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


def optimizer(named_params):
    return RiemannianSGD([p for _, p in named_params], lr=0.3)


def example_batch():
    return {"pairs": torch.randint(30, (8, 6))}


def batches(seed):
    while True:
        yield example_batch()
