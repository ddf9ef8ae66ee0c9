"""Lion inside Lookahead: slow weights in the wrapper's state, which every fifth step are moved and copied back.

https://github.com/kozistr/pytorch_optimizer/pull/3
"""

import torch
import torch.nn.functional as F
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg, (b1, b2) = state["exp_avg"], group["betas"]
                update = exp_avg * b1 + p.grad * (1 - b1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(b2).add_(p.grad, alpha=1 - b2)


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base_optimizer, alpha=0.5, k=2):
        defaults = dict(lookahead_alpha=alpha, lookahead_k=k, lookahead_step=0)
        self.base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.defaults.update(defaults)
        self.state = base_optimizer.state
        for name, default in defaults.items():
            for group in self.param_groups:
                group.setdefault(name, default)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for p in group["params"]:
                    state = self.state[p]
                    if "slow_buffer" not in state:
                        state["slow_buffer"] = p.data.clone()
                    slow = state["slow_buffer"]
                    slow.add_(p.data - slow, alpha=group["lookahead_alpha"])
                    p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base_optimizer.zero_grad(set_to_none)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 24), nn.Mish(), nn.Linear(24, 24), nn.Mish(), nn.Linear(24, 3))

    def forward(self, x):
        return self.layers(x)


def model():
    return Net()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"], label_smoothing=0.1)


def optimizer(named_params):
    return Lookahead(Lion([p for _, p in named_params], lr=1e-3, weight_decay=1e-2))


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 10, generator=g), "y": torch.randint(3, (8,), generator=g)}


def example_batch():
    return next(batches(0))
