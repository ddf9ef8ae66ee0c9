"""Prodigy: the rate of all parameters is estimated from sums over all gradients.

https://github.com/konstmish/prodigy
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Prodigy(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, d0=1e-3, d_coef=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, d=d0, d0=d0, d_max=d0, d_numerator=0.0, d_coef=d_coef, k=0))

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        (beta1, beta2), d, d0 = group["betas"], group["d"], group["d0"]
        beta3 = math.sqrt(beta2)
        d_numerator, d_denom = group["d_numerator"] * beta3, 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if "step" not in state:
                state.update(step=0, s=torch.zeros_like(p), p0=p.detach().clone(), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            d_numerator += (d / d0) * d * float(torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()))
            state["exp_avg"].mul_(beta1).add_(p.grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta3).add_(p.grad, alpha=(d / d0) * d)
            d_denom += float(state["s"].abs().sum())
        if d_denom == 0:
            return
        d_hat = group["d_coef"] * d_numerator / d_denom
        if d == d0:
            d = max(d, d_hat)
        d_max = max(group["d_max"], d_hat)
        d = min(d_max, d * 2.0)
        group.update(d=d, d_max=d_max, d_numerator=d_numerator, k=group["k"] + 1)
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["step"] += 1
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * group["eps"]), value=-d * group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.net(x)


def model():
    return Net()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(named_params):
    return Prodigy([p for _, p in named_params])


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 8, generator=g), "y": torch.randint(3, (8,), generator=g)}


def example_batch():
    return next(batches(0))
