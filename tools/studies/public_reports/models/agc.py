"""Adaptive gradient clipping around another optimizer, by the norm of each unit.

https://github.com/lessw2020/Ranger21/issues/1
"""

import torch
import torch.nn.functional as F
from torch import nn


def unitwise_norm(x):
    dim = [1, 2, 3] if x.ndim == 4 else 0
    return torch.sum(x**2, dim=dim, keepdim=x.ndim > 1) ** 0.5


class AGC(torch.optim.Optimizer):
    def __init__(self, params, optim, clipping=1e-2, eps=1e-3):
        self.optim = optim
        super().__init__(params, {"clipping": clipping, "eps": eps, **optim.defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                param_norm = torch.max(unitwise_norm(p), torch.tensor(group["eps"]))
                grad_norm = unitwise_norm(p.grad)
                max_norm = param_norm * group["clipping"]
                clipped = p.grad * (max_norm / torch.max(grad_norm, torch.tensor(1e-6)))
                p.grad.copy_(torch.where(grad_norm > max_norm, clipped, p.grad))
        self.optim.step(closure)


def model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )


def example_batch():
    return torch.randn(8, 3, 8, 8), torch.randint(4, (8,))


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def optimizer(named_params):
    params = [p for _, p in named_params]
    return AGC(params, torch.optim.SGD(params, lr=0.1, momentum=0.9))
