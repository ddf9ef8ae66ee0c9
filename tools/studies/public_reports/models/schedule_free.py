"""An optimizer with train() and eval() modes, whose weights are kept at another point than they are evaluated.

https://github.com/kohya-ss/sd-scripts/issues/1667
"""

import torch
import torch.nn.functional as F
from torch import nn


class SGDScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False, "weight_sum": 0.0})

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["momentum"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            group["weight_sum"] += group["lr"] ** 2
            c = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (group["momentum"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def model():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def example_batch():
    return torch.randn(16, 10), torch.randint(3, (16,))


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def optimizer(named_params):
    made = SGDScheduleFree([p for _, p in named_params])
    made.train()
    return made
