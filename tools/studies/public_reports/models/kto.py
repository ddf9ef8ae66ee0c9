"""Unpaired preferences: a reference point that is a mean over the batch, floored at zero, and two masked means.

https://github.com/huggingface/trl/pull/2153
"""

import torch
import torch.nn.functional as F
from torch import nn

V = 13


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, 16)
        self.f = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, V))

    def forward(self, input_ids, KL_input_ids):
        one = lambda ids: F.log_softmax(self.f(self.e(ids[:, :-1]).cumsum(1)), -1).gather(2, ids[:, 1:, None])[..., 0].sum(1)  # noqa: E731
        with torch.no_grad():
            kl = one(KL_input_ids)
        return one(input_ids), kl


def model():
    return LM()


def loss(output, batch):
    logps, kl_logps = output
    label = batch["label"]
    kl = (kl_logps - batch["reference_KL_logps"]).mean().detach().clamp(min=0)
    chosen = (logps - batch["reference_logps"])[label]
    rejected = (logps - batch["reference_logps"])[~label]
    losses = torch.cat((1.0 * (1 - F.sigmoid(0.1 * (chosen - kl))), 1.3 * (1 - F.sigmoid(0.1 * (kl - rejected)))), 0)
    return losses.nanmean()


def optimizer(named_params):
    return torch.optim.RMSprop([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(V, (8, 8), generator=g)
        yield {
            "input_ids": ids, "KL_input_ids": torch.cat([ids[:, :3], ids.roll(1, 0)[:, 3:]], 1), "label": torch.rand(8, generator=g) > 0.5,
            "reference_logps": -18 - 4 * torch.rand(8, generator=g), "reference_KL_logps": -19 - 8 * torch.rand(8, generator=g),
        }


def example_batch():
    return next(batches(0))
