"""Shampoo: a preconditioner for each dimension of each weight, whose inverse root is computed every other step.

https://github.com/moskomule/shampoo.pytorch
"""

import torch
from torch import nn


def _matrix_power(matrix, power):
    u, s, v = torch.svd(matrix)
    return u @ s.pow_(power).diag() @ v.t()


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-1, momentum=0.9, epsilon=1e-2, update_freq=2):
        super().__init__(params, dict(lr=lr, momentum=momentum, epsilon=epsilon, update_freq=update_freq))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, order, state = p.grad.data, p.grad.ndimension(), self.state[p]
                original, momentum = grad.size(), group["momentum"]
                if len(state) == 0:
                    state["step"] = 0
                    state["momentum_buffer"] = grad.clone()
                    for dim_id, dim in enumerate(grad.size()):
                        state[f"precond_{dim_id}"] = group["epsilon"] * torch.eye(dim)
                        state[f"inv_precond_{dim_id}"] = torch.zeros(dim, dim)
                grad = grad * (1 - momentum) + state["momentum_buffer"] * momentum
                for dim_id, dim in enumerate(grad.size()):
                    precond = state[f"precond_{dim_id}"]
                    grad = grad.transpose(0, dim_id).contiguous()
                    transposed = grad.size()
                    grad = grad.view(dim, -1)
                    precond.add_(grad @ grad.t())
                    if state["step"] % group["update_freq"] == 0:
                        state[f"inv_precond_{dim_id}"].copy_(_matrix_power(precond, -1 / order))
                    inv = state[f"inv_precond_{dim_id}"]
                    if dim_id == order - 1:
                        grad = (grad.t() @ inv).view(original)
                    else:
                        grad = (inv @ grad).view(transposed)
                state["step"] += 1
                state["momentum_buffer"] = grad
                p.data.add_(grad, alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def model():
    return Net()


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["y"])


def optimizer(named_params):
    return Shampoo([p for _, p in named_params], lr=0.05)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(8, 8, generator=g)
        yield {"x": x, "y": x[:, :2].sin()}


def example_batch():
    return next(batches(0))
