"""A physics-informed network, its derivatives in the loss, trained with LBFGS.

https://github.com/PINA-org/PINA/issues/100
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, t):
        return self.body(torch.cat([x, t], 1))


net = None


def model():
    global net
    net = Net()
    return net


def loss(output, batch):
    x, t = batch["x"].detach().requires_grad_(), batch["t"].detach().requires_grad_()
    u = net(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    residual = (u_t - 0.1 * u_xx).square().mean()
    return residual + (output - torch.sin(3 * batch["x"])).square().mean()


def example_batch():
    return {"x": torch.rand(16, 1), "t": torch.rand(16, 1)}


def batches(seed):
    batch = example_batch()
    while True:
        yield batch


def optimizer(named_params):
    return torch.optim.LBFGS([p for _, p in named_params], max_iter=5, line_search_fn="strong_wolfe")
