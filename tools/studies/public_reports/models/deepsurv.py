"""A Cox model: each event's risk set is all rows of the batch that live longer.

https://github.com/Novartis/torchsurv/issues/35
"""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(10, 24), nn.SELU(), nn.AlphaDropout(0.0), nn.Linear(24, 24), nn.SELU(), nn.Linear(24, 1, bias=False))


def loss(output, batch):
    _, durations, events = batch
    idx = durations.sort(descending=True)[1]
    events, log_h = events[idx].float(), output.view(-1)[idx]
    gamma = log_h.max()
    log_cumsum_h = log_h.sub(gamma).exp().cumsum(0).add(1e-7).log().add(gamma)
    return -log_h.sub(log_cumsum_h).mul(events).sum().div(events.sum())


def optimizer(named_params):
    return torch.optim.NAdam([p for _, p in named_params], lr=1e-2, weight_decay=1e-3, decoupled_weight_decay=True)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(16, 10, generator=g), torch.rand(16, generator=g), torch.rand(16, generator=g) > 0.3


def example_batch():
    return next(batches(0))
