"""R-Drop: every row twice within forward, so that dropout draws twice; a symmetric divergence between both.

https://github.com/dropreg/R-Drop
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 5))

    def forward(self, x, y):
        logits = self.net(torch.cat([x, x.clone()], 0))
        p, q = logits.chunk(2)
        ce = 0.5 * (F.cross_entropy(p, y) + F.cross_entropy(q, y))
        p_loss = F.kl_div(F.log_softmax(p, -1), F.softmax(q, -1), reduction="none").sum()
        q_loss = F.kl_div(F.log_softmax(q, -1), F.softmax(p, -1), reduction="none").sum()
        return ce + 0.5 * (p_loss + q_loss) / 2 / x.shape[0]


def model():
    return Net()


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 12, generator=g), "y": torch.randint(5, (8,), generator=g)}


def example_batch():
    return next(batches(0))
