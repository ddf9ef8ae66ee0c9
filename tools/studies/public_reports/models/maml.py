"""MAML: an inner gradient step on each task's support set, within forward.

https://github.com/pytorch/pytorch/issues/63929
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class MAML(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, support_x, support_y, query_x, query_y):
        losses = []
        for sx, sy, qx, qy in zip(support_x, support_y, query_x, query_y):
            params = dict(self.net.named_parameters())
            inner = F.mse_loss(functional_call(self.net, params, (sx,)), sy)
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads)}
            losses.append(F.mse_loss(functional_call(self.net, fast, (qx,)), qy))
        return torch.stack(losses).mean()


def model():
    return MAML()


def example_batch():
    return {
        "support_x": torch.randn(4, 5, 3), "support_y": torch.randn(4, 5, 1),
        "query_x": torch.randn(4, 5, 3), "query_y": torch.randn(4, 5, 1),
    }


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    return torch.optim.Adam(named_params, lr=1e-3)
