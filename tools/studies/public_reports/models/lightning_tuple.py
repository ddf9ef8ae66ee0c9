"""Configure_optimizers returns ([optimizer], [scheduler]), training_step the loss beside logged values in a dict.

https://github.com/Lightning-AI/pytorch-lightning/issues/246
"""

import torch
import torch.nn.functional as F
from torch import nn


class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.body(x)


def model():
    return Lit()


def example_batch():
    return {"x": torch.randn(16, 10), "y": torch.randint(3, (16,))}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    loss = F.cross_entropy(output, batch["y"])
    accuracy = (output.argmax(1) == batch["y"]).float().mean()
    return {"loss": loss, "accuracy": accuracy}


def optimizer(named_params):
    made = torch.optim.AdamW([p for _, p in named_params], lr=1e-2)
    return [made], [torch.optim.lr_scheduler.CosineAnnealingLR(made, 10)]
